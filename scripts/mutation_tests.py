"""Which files are mutated, and which tests hold them."""

from __future__ import annotations

from trials import PACKAGE, ROOT

CONFORMANCE = "tests/test_conformance.py::test_every_method_and_supported_composition_conforms"
LAWS = ("tests/test_theorems.py", "tests/test_reductions.py")

MUTATED = ("core", "training", "methods", "privacy")
# Files that no test on a CPU can hold, or that compute nothing that a run relies on.
LEFT_OUT = {
    "training/cuda_graphs.py": "it records and replays programs of a GPU; a CPU never runs most of it",
    "core/__init__.py": "nothing in it",
    "privacy/__init__.py": "nothing in it",
    "training/__init__.py": "nothing in it",
    "methods/cards.py": "it reads the cards, which tests/test_cards.py holds",
    "methods/__init__.py": "an index, which tests/test_options.py and the conformance tests hold",
}

LEARNING = ("tests/test_learn.py", "tests/test_unequal_clients.py", "tests/test_reductions.py")
ROUNDS = ("tests/test_rounds.py", "tests/test_checkpoint.py", "tests/test_laws.py")
PRIVATE = ("tests/test_privacy.py", "tests/test_privacy_ghost.py")
LIES = ("tests/test_audit_lies.py",)
DETAILS = ("tests/test_details.py",)
COST = ("tests/test_privacy_budget.py", "tests/test_privacy_clients.py")

# What a core or privacy file is held by: of these tests, those that run its lines.
HELD_BY: dict[str, tuple[str, ...]] = {
    "training/phase_trainer.py": (*LEARNING, *PRIVATE, "tests/test_rows.py"),
    "core/chacha.py": ("tests/test_chacha.py", "tests/test_noise_attack.py"),
    "core/checkpoint.py": (*DETAILS, *ROUNDS[:2], "tests/test_damage.py"),
    "core/drift.py": ("tests/test_drift.py", "tests/test_rows.py"),
    "core/atomic_files.py": (*DETAILS, *ROUNDS[:2], "tests/test_damage.py", "tests/test_strangers.py"),
    "training/ghost_clipping.py": PRIVATE,
    "training/local_training.py": (*LEARNING, "tests/test_privacy.py", "tests/test_rows.py"),
    "core/client.py": (*LEARNING, "tests/test_privacy.py", "tests/test_rows.py"),
    "core/batch_schedule.py": (*LEARNING, "tests/test_privacy.py", "tests/test_ranges.py"),
    "core/data.py": ("tests/test_learn.py",),
    "core/dp_settings.py": PRIVATE,
    "core/noise.py": (*PRIVATE, "tests/test_chacha.py"),
    "core/versions.py": (*DETAILS, *ROUNDS),
    "core/memory.py": ("tests/test_ranges.py",),
    "core/method.py": (
        *DETAILS,
        "tests/test_laws.py",
        "tests/test_rounds.py",
        "tests/test_learn.py",
        "tests/test_privacy.py",
    ),
    "core/model.py": ("tests/test_laws.py", "tests/test_learn.py", "tests/test_profile.py", "tests/test_rounds.py"),
    "core/optim.py": ("tests/test_optim.py", "tests/test_graphs.py", "tests/test_learn.py"),
    "core/options.py": ("tests/test_options.py", "tests/test_config.py", "tests/test_ranges.py"),
    "core/plan.py": (*DETAILS, "tests/test_laws.py", "tests/test_learn.py", "tests/test_rounds.py"),
    "training/dp_sgd.py": (*PRIVATE, "tests/test_chacha.py"),
    "core/update_checks.py": ("tests/test_replies.py", "tests/test_rounds.py", "tests/test_hostile_replies.py"),
    "core/rng.py": (
        "tests/test_chacha.py",
        "tests/test_laws.py",
        "tests/test_learn.py",
        "tests/test_privacy.py",
        "tests/test_rounds.py",
    ),
    "core/rounds.py": (*DETAILS, *ROUNDS, "tests/test_faults.py"),
    "core/packed.py": (*DETAILS, "tests/test_rows.py", "tests/test_laws.py"),
    "core/settings.py": ("tests/test_learn.py", "tests/test_rounds.py", "tests/test_privacy.py"),
    "training/batching.py": (*LEARNING[:2], "tests/test_privacy.py"),
    "core/client_store.py": (*DETAILS, *ROUNDS[:2]),
    "core/safe_text.py": ("tests/test_strangers.py", "tests/test_flower_site_attacks.py"),
    "core/tensors.py": ("tests/test_laws.py", "tests/test_rounds.py", "tests/test_learn.py", "tests/test_rows.py"),
    "core/serialization.py": (
        "tests/test_rows.py",
        "tests/test_laws.py",
        "tests/test_rounds.py",
        "tests/test_checkpoint.py",
    ),
    "privacy/accountant.py": COST,
    "privacy/membership.py": ("tests/test_audit.py",),
    "privacy/canaries.py": ("tests/test_audit.py",),
    "privacy/budget.py": COST[:1],
    "privacy/client_level.py": COST[::-1],
    "privacy/disclosure.py": ("tests/test_disclosure.py",),
    "privacy/evidence.py": ("tests/test_evidence.py", *LIES),
    "privacy/guard.py": (*DETAILS, *COST),
    "privacy/spending.py": (*COST, "tests/test_privacy.py"),
    "privacy/mechanism.py": ("tests/test_mechanism.py", *LIES),
    "privacy/mechanism_choice.py": ("tests/test_mechanism.py", *LIES),
    "privacy/mechanism_clients.py": ("tests/test_mechanism.py", *LIES),
    "privacy/secret.py": ("tests/test_secret.py",),
}

# Every method is held by tests/methods/test_<file>.py and by its line of the conformance test; some by more than that.
MORE_TESTS: dict[str, tuple[str, ...]] = {
    "methods/centralized.py": LAWS,
    "methods/fedavg.py": LAWS,
    "methods/fedfrozen.py": (*LAWS, "tests/methods/test_auto_warmup.py"),
    "methods/fedprox.py": LAWS,
    "methods/local_only.py": LAWS,
}


def known() -> list[str]:
    """The files that are mutated."""
    found = [
        f"{part}/{path.name}"
        for part in ("core", "training", "methods", "privacy")
        for path in (PACKAGE / part).glob("*.py")
    ]
    return sorted(set(found) - LEFT_OUT.keys())


def tests_of(file: str) -> tuple[str, ...]:
    """Files of tests, and single tests."""
    from partita.methods import INDEX

    part, _, name = file.partition("/")
    if part != "methods":
        return HELD_BY.get(file, ())
    own = f"tests/methods/test_{name}"
    place = f"partita.methods.{name.removesuffix('.py')}:"
    conform = [f"{CONFORMANCE}[{each}]" for each, where in INDEX.items() if where.startswith(place)]
    return (*([own] if (ROOT / own).exists() else []), *MORE_TESTS.get(file, ()), *conform)
