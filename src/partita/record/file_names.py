"""Names of the files in a run folder, in a folder of runs that are compared, and in a tuning."""

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
PLAN = "plan.json"
PRIVACY = "privacy.json"
SPLIT = "split.json"
CHECKSUMS = "checksums.json"
ROWS = "rows.jsonl"
PROGRESS = "progress.json"  # only while the run goes on, or if it failed or was stopped
CHECKPOINTS = "checkpoints"
CLIENTS = "clients"
TRACK = "track"  # what trackers keep on this machine
SAMPLES = "samples.json"
RESULT = "result.json"
AUDIT = "audit.json"
REPORT = "report.html"
LOCK = ".lock"
EXTENSION = "extension.json"  # only while files are replaced to extend the run

COMPARISON = "comparison.json"  # beside compared runs while they are run: all of them, also those that have not started

TUNING = "tune.json"
TRIALS = "trials"
TRIAL = "trial.json"
CHOSEN = "chosen.json"

EXPORTED = "partita.json"  # what an exported model is
