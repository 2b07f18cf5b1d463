"""Mutants that survive, and why. Lines are named by what they say, because their numbers change."""

from __future__ import annotations

from mutants import Spot

ANY = "*"  # in the place of a change: whatever is changed in that line, if it survives

# No test could notice: the mutant computes the same wherever it can be reached.
EQUIVALENT: dict[Spot, str] = {
    (
        "core/keyed_bits.py",
        "_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32",
        ANY,
    ): "it is the same factor in int32, which wraps",
    (
        "core/keyed_bits.py",
        "return (words >= round(rate * 2**32) - 2**31).to(dtype) * (1 / (1 - rate))",
        "round(rate * 2 ** 32) - 2 ** 31 -> round(rate * 2 ** 32) + 2 ** 31",
    ): "it is the same bound in int32, which wraps",
    (
        "core/keyed_bits.py",
        "if torch.compiler.is_compiling():  # the compiler's C++ may not assume that int32 wraps; it fuses the casts",
        ANY,
    ): "outside the compiler, both ways compute the same",
    (
        "core/keyed_bits.py",
        "return (number + 2**31) % 2**32 - 2**31",
        ANY,
    ): "it is the same number in int32, which wraps",
    (
        "core/serialization.py",
        "return {name: value.clone() if value.data_ptr() % ALIGNMENT else value for name, value in found.items()}",
        "value.data_ptr() % ALIGNMENT -> not value.data_ptr() % ALIGNMENT",
    ): "safetensors aligns by chance; the tests of resumed runs notice it on some machines",
    (
        "training/batching.py",
        "if len(sources) < len(rows):",
        "len(sources) < len(rows) -> len(sources) <= len(rows)",
    ): "which rows are read ahead together, which only saves time",
    (
        "training/augmentation.py",
        "images = pixels.flatten(0, -4) if pixels.ndim > 4 else pixels  # (example, channel, height, width)",
        "pixels.ndim > 4 -> pixels.ndim >= 4",
    ): "flattening one dimension changes nothing",
    (
        "training/augmentation.py",
        'draws = uniforms(random_words(seeds, place_id(f"augment.{name}"), (DRAWS.get(name, 2),)))',
        "2 -> 3",
    ): "a further draw does not change the others",
    (
        "training/augmentation.py",
        "return torch.where(_column(draws[:, 0] < 0.5), images.flip(-1), images)",
        "draws[:, 0] < 0.5 -> draws[:, 0] <= 0.5",
    ): "one draw in 2**24",
    (
        "training/augmentation.py",
        "classes = targets.reshape(len(images), 1, *images.shape[-2:]) if has_map else None",
        "-2 -> 2",
    ): "images have four dimensions",
    (
        "training/phase_work.py",
        "name: (stack_all if name in kept else stack_or_share)([part[name] for part in parts]) for name in parts[0]",
        "0 -> 1",
    ): "all clients have parameters of the same names",
    (
        "core/own_code.py",
        "return hashlib.blake2b(text.rstrip(), digest_size=16).hexdigest()",
        ANY,
    ): "a digest of any length tells versions apart",
    (
        "core/sampling.py",
        'return [clients[place] for place in np.argsort(arrival, kind="stable")[:count]]',
        "np.argsort(...) without kind='stable'",
    ): "two arrivals are never equal",
    (
        "methods/pfedme.py",
        "return average(updates, weigh=lambda update: 1.0)",
        "1.0 -> 2.0",
    ): "only the ratio of weights counts",
    (
        "methods/fedala.py",
        "shared = (ctx.plan.down & ctx.plan.train) - input_side_names(ctx.model)",
        "ctx.plan.down & ctx.plan.train -> ctx.plan.down",
    ): "what does not train is equal at server and client, so mixing the two changes nothing",
    (
        "methods/fedadamw.py",
        "return means.view(-1, *[1] * (like.ndim - 1)).expand(like.shape) if like.ndim > 1 "
        "else means.expand(like.shape)",
        "like.ndim > 1 -> like.ndim >= 1",
    ): "one mean of a vector has the same view either way",
    (
        "privacy/disclosure.py",
        'withheld = {key for key in row.keys() & ROW.keys() if ROW[key].under(unit) == "withheld"}',
        "row.keys() & ROW.keys() -> ROW.keys()",
    ): "only keys of the row are looked up in it",
    (
        "privacy/disclosure.py",
        'return {kind: text for kind, text in value.items() if key == "alarms" and kind in TEST_ALARMS}',
        "key == 'alarms' and kind in TEST_ALARMS -> kind in TEST_ALARMS",
    ): "no other key of a row has kinds of alarms in it",
    (
        "training/parameter_groups.py",
        "factors = _lr_factors(model, training.layer_decay) if training.layer_decay < 1 else {}",
        ANY,
    ): "with layer_decay = 1, its largest value, all factors are 1",
    (
        "compression/prune.py",
        "return PLACES, (places + low).to(kind)",
        "places + low -> places - low",
    ): "low is 0, or half the range of an int16, which wraps around to the same number either way",
    (
        "compression/prune.py",
        "bits = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=places.device)",
        "torch.zeros(...) without dtype=torch.uint8",
    ): "zeros and ones in any type; their sum is in bytes",
    (
        "compression/prune.py",
        "weights = 2 ** torch.arange(8, dtype=torch.uint8, device=places.device)",
        "torch.arange(...) without dtype=torch.uint8",
    ): "the sum of the products is in bytes",
    (
        "compression/prune.py",
        "bits = encoded[:, None].bitwise_and(2 ** torch.arange(8, dtype=torch.uint8, device=encoded.device)).flatten()",
        "torch.arange(...) without dtype=torch.uint8",
    ): "bits that are not zero are so in any type",
    (
        "compression/prune.py",
        "return (-(2**15), torch.int16) if size <= 2**16 else (0, torch.int32)",
        "0 -> 1",
    ): "added by one side and subtracted by the other",
    (
        "compression/prune.py",
        "kept = torch.zeros(len(attention), dtype=torch.bool, device=attention.device)",
        "torch.zeros(...) without dtype=torch.bool",
    ): "any() gives a bool for any type",
    (
        "core/rounds.py",
        "self.population = 0",
        "0 -> 1",
    ): "it is set before it is read",
    (
        "core/plan.py",
        "if not (plan.down <= known >= plan.keep):  # `train` and `up` are subsets of these two",
        ANY,
    ): "inside, the names themselves are compared again; asking first only saves time",
    (
        "core/update_checks.py",
        "self.steps = lru_cache(maxsize=1024)(self._steps)",
        ANY,
    ): "how many answers are remembered, which only saves time",
    (
        "core/update_checks.py",
        "new = {name: self.model.initial[name] for name in sorted(names - self._squares.keys())}",
        "names - self._squares.keys() -> names",
    ): "it computes again what it knows, with the same result",
    (
        "core/drift.py",
        "shares = {tag: weight / math.sqrt(length) if length else 0.0 for tag, length in lengths.items()}",
        "0.0 -> 1.0",
    ): "the share multiplies a delta of zeros",
    (
        "core/drift.py",
        "if len(self.queued) * len(delta.buffer) > _MAX_ELEMENTS:",
        "len(self.queued) * len(delta.buffer) > _MAX_ELEMENTS -> len(self.queued) * len(delta.buffer) >= _MAX_ELEMENTS",
    ): "how many deltas are summed at once, which only takes memory",
    (
        "core/drift.py",
        '"cosine": along / pointed / length if pointed and length else 0.0,',
        "pointed and length -> length",
    ): "a mean that is not zero has an update that is not zero",
    (
        "storage/initial_values.py",
        "if value is None or not (value is first or tensors.same(value, first.to(value.device))):",
        "value is first or tensors.same(value, first.to(value.device)) -> tensors.same(value, first.to(value.device))",
    ): "the same object has the same bits; asking first only saves time",
    (
        "core/hub.py",
        'if proxy and not proxy_bypass(parts.hostname or ""):',
        "parts.hostname or '' -> parts.hostname",
    ): "no host is never bypassed",
    (
        "training/batching.py",
        "if value.ndim > 1 and value.shape[1] < width:",
        "value.ndim > 1 and value.shape[1] < width -> value.ndim > 1",
    ): "it appends nothing to what is wide enough",
    (
        "training/batching.py",
        "if value.ndim > 1 and value.shape[1] < width:",
        "value.shape[1] < width -> value.shape[1] <= width",
    ): "it appends nothing to what is wide enough",
    (
        "training/batching.py",
        "width = max(value.shape[1] if value.ndim > 1 else 0 for value in values)",
        "0 -> 1",
    ): "a value without a second dimension has no width",
    (
        "core/packed.py",
        "pieces = list(rows.split_with_sizes(self.sizes, -1))",
        "-1 -> 1",
    ): "rows have two dimensions",
    (
        "core/tensors.py",
        "return not bits[:64].any() and not bits.any()  # most tensors differ from zero at their start",
        "not bits[:64].any() and (not bits.any()) -> not bits.any()",
    ): "the first condition only saves time",
    (
        "core/tensors.py",
        "return not bits[:64].any() and not bits.any()  # most tensors differ from zero at their start",
        "bits[:64].any() -> bits[:64].all()",
    ): "the first condition only saves time",
    (
        "core/tensors.py",
        "return not bits[:64].any() and not bits.any()  # most tensors differ from zero at their start",
        "64 -> 65",
    ): "the first condition only saves time",
    (
        "training/ghost_clipping.py",
        "super().__init__()",
        "super().__init__() -> None",
    ): "the base class of torch initializes nothing",
    (
        "core/batch_schedule.py",
        "share = min(1.0, training.batch_size / count)",
        "1.0 -> 2.0",
    ): "a draw is below 1, so every example is included with a share of 1 or above",
    (
        "core/optim.py",
        "if round < self.warmup:",
        "round < self.warmup -> round <= self.warmup",
    ): "where the rise ends every schedule has the factor 1",
    (
        "storage/client_store.py",
        "self.commits = (0, 0)  # completed rounds at the last two checkpoints: both must stay usable",
        "0 -> 1",
    ): "before round 1 there is one state at most, and the newest is never dropped",
    (
        "privacy/guard.py",
        "trial_run = under(1.0 if privacy_config.noise is None else privacy_config.noise)",
        "1.0 -> 2.0",
    ): "the search replaces it before anything is counted",
    (
        "privacy/accountant.py",
        "if any(not release.noise for release in bill):",
        "any((not release.noise for release in bill)) -> all((not release.noise for release in bill))",
    ): "without noise Rényi's bound is infinite as well",
    (
        "privacy/budget.py",
        "width = max(map(len, self.instead))",
        "max(map(len, self.instead)) -> min(map(len, self.instead))",
    ): "blanks at the end of a line are taken off again",
    (
        "privacy/guard.py",
        "ahead = trial.forecast(run.rounds if known else 0)",
        "0 -> 1",
    ): "where sizes are not known, the bill is not looked at",
    (
        "privacy/guard.py",
        "return min(1e-5, 0.1 / max(1, units))",
        "1 -> 2",
    ): "of one unit or two a tenth is far above 1e-5",
    (
        "privacy/spending.py",
        "for key in sorted(owners, key=lambda key: (-bounds[key], owners[key])):",
        ANY,
    ): "the order decides how many bills are counted exactly, and which of two of equal cost is named",
    (
        "privacy/spending.py",
        "if bounds[key] <= worst[1]:",
        "bounds[key] <= worst[1] -> bounds[key] < worst[1]",
    ): "at equality the exact cost, which is never above its bound, is not above the largest either",
    (
        "privacy/spending.py",
        "client, cost = account.with_noise(noise or 1.0).worst()",
        ANY,
    ): "which client is searched first; the loop goes on until the noise suffices for all",
    (
        "privacy/spending.py",
        "low, high, highest = -1.0, 1.0, math.log(MAX_NOISE)",
        ANY,
    ): "where the search begins; both ends move until they enclose the answer",
    (
        "privacy/spending.py",
        "while excess(high) > 0:",
        "excess(high) > 0 -> excess(high) >= 0",
    ): "where the excess is zero the search is over, from whichever end",
    (
        "privacy/spending.py",
        "low, high = high, min(high + 2, highest)",
        ANY,
    ): "a longer step to an upper end above the answer; a shorter one never ends",
    (
        "privacy/spending.py",
        "noise = round_up(math.exp(brentq(excess, low, high, xtol=1e-4)))",
        "brentq(...) without xtol=0.0001",
    ): "a search to more digits than are kept takes longer and is rounded up to the same",
    (
        "privacy/spending.py",
        "if cost > worst[1]:",
        "cost > worst[1] -> cost >= worst[1]",
    ): "which of two clients of equal cost is named",
    (
        "privacy/spending.py",
        "while excess(low) < 0:",
        "excess(low) < 0 -> excess(low) <= 0",
    ): "where the excess is zero the search is over, from whichever end",
    (
        "privacy/spending.py",
        "low -= 1",
        "1 -> 2",
    ): "a longer step to where the search begins",
    (
        "privacy/mechanism_clients.py",
        "longer_run = replace(run, method=method, min_updates=0, rounds=max(count, run.rounds), drift=False)",
        "replace(...) without drift=False",
    ): "drift is measured beside the recorded aggregates, and leaving it out only saves time",
    (
        "privacy/mechanism_clients.py",
        "longer_run = replace(run, method=method, min_updates=0, rounds=max(count, run.rounds), drift=False)",
        "False -> True",
    ): "drift is measured beside the recorded aggregates, and leaving it out only saves time",
    (
        "privacy/mechanism_clients.py",
        "pmf = np.convolve(pmf, hypergeom.pmf(np.arange(charged + 1), population, charged, charged))",
        "1 -> 2",
    ): "more clients than were asked cannot be asked again: that probability is zero",
    (
        "privacy/mechanism_choice.py",
        "return np.zeros((0, 0))",
        ANY,
    ): "fewer than two scores are not checked, however many choices there are",
    (
        "privacy/mechanism_choice.py",
        'for what, rows in (("rounds", scores if rounds > 1 else scores[:0]), ("clients", scores[::rounds])):',
        "0 -> 1",
    ): "one choice makes no pair, as none does",
    (
        "training/batching.py",
        "first = examples[0]",
        "0 -> 1",
    ): "there are at least two, and all must have the table of whichever is looked at",
    (
        "training/dp_sgd.py",
        "shares = (dp_settings.clip / norms).clamp(max=1.0).masked_fill(out, 0.0)",
        "0.0 -> 1.0",
    ): "the gradients of examples that are left out are zero as well",
    (
        "training/dp_sgd.py",
        "whole = grad.reshape(len(grad), -1).masked_fill(out.unsqueeze(1), 0.0)  # (example, element)",
        "0.0 -> 1.0",
    ): "the shares of examples that are left out are zero as well",
    (
        "methods/fedfrozen.py",
        "for shape in sorted(shapes, key=tuple):",
        "sorted(...) without key=tuple",
    ): "a torch.Size is a tuple and sorts as one",
    (
        "methods/fedprox.py",
        "held = sorted(ctx.plan.train & ctx.plan.down)",
        "ctx.plan.train & ctx.plan.down -> ctx.plan.down",
    ): "what came down and does not train is still at its anchor, so its square is zero",
    (
        "methods/fedtp.py",
        "total = sum(embedding_steps.weight.values()) or 1.0",
        "1.0 -> 2.0",
    ): "only where all weights are zero, and then zero is divided by it",
    (
        "privacy/mechanism.py",
        "dots[at] += product",
        "dots[at] += product -> dots[at] -= product",
    ): "a cosine counts by its size, whatever its sign",
    (
        "privacy/mechanism.py",
        "own[at] += square",
        "own[at] += square -> own[at] -= square",
    ): "norms enter as products of two, whatever their sign",
    (
        "privacy/mechanism.py",
        "dots[at] += table @ table.T",
        "dots[at] += table @ table.T -> dots[at] -= table @ table.T",
    ): "a cosine counts by its size, whatever its sign",
    (
        "privacy/mechanism.py",
        "own[at] += table**2 @ filled.T",
        "own[at] += table ** 2 @ filled.T -> own[at] -= table ** 2 @ filled.T",
    ): "norms enter as products of two, whatever their sign",
    (
        "privacy/mechanism.py",
        "group[0].ctx.model, losses=lambda out, targets, plain=plain: LARGE_FACTOR * plain(out, targets)",
        "LARGE_FACTOR * plain(out, targets) -> LARGE_FACTOR / plain(out, targets)",
    ): "any loss with gradients far above the clip: every example then contributes exactly the clip",
    (
        "privacy/membership.py",
        "steps = np.arange(1, right + 1)",
        "1 -> 2",
    ): "one step further: fewer than no guesses are never right, so nothing is gathered there",
    (
        "privacy/membership.py",
        "if excess(0.0) >= 0:",
        "excess(0.0) >= 0 -> excess(0.0) > 0",
    ): "where the excess is zero at zero, the search returns zero as well",
    (
        "privacy/membership.py",
        "high = 1.0",
        "1.0 -> 2.0",
    ): "where the search begins; the end moves until it is above the answer",
    (
        "privacy/membership.py",
        "while excess(high) < 0:",
        "excess(high) < 0 -> excess(high) <= 0",
    ): "where the excess is zero the search is over, from whichever end",
    (
        "privacy/membership.py",
        "high *= 2",
        "2 -> 3",
    ): "a longer step to an upper end above the answer",
    (
        "privacy/canaries.py",
        "client: torch.rand(self.count(client), generator=(key / client).generator()) < 0.5 for client in self.places",
        "torch.rand(self.count(client), generator=(key / client).generator()) < 0.5 "
        "-> torch.rand(self.count(client), generator=(key / client).generator()) >= 0.5",
    ): "the other side of a fair coin",
    (
        "privacy/canaries.py",
        "client: torch.rand(self.count(client), generator=(key / client).generator()) < 0.5 for client in self.places",
        "torch.rand(self.count(client), generator=(key / client).generator()) < 0.5 "
        "-> torch.rand(self.count(client), generator=(key / client).generator()) <= 0.5",
    ): "a draw that is a half to the last digit",
    (
        "storage/atomic_files.py",
        "while line := file.readline(MAX_LINE_BYTES + 1):",
        "1 -> 2",
    ): "a line that is too long is refused, with one byte more or with two",
    (
        "core/options.py",
        "if kind is None or kind is type(None):",
        "kind is None or kind is type(None) -> kind is None",
    ): "None is the only instance of its type, which the last line asks",
    (
        "core/options.py",
        'return text.isprintable() or not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text)',
        "text.isprintable() or not any((unicodedata.category(char) in ('Cc', 'Cs', 'Zl', 'Zp') for char in text)) "
        "-> not any((unicodedata.category(char) in ('Cc', 'Cs', 'Zl', 'Zp') for char in text))",
    ): "a printable text has no such character; asking that first only saves time",
}

# The mutant computes something else, and no test notices: none can, or it would hold a detail that nobody relies on.
UNCOVERED: dict[Spot, str] = {
    (
        "core/own_code.py",
        "known = [name for name, value in vars(module).items() if callable(value) and _is_own(value, module)]",
        "callable(value) and _is_own(value, module) -> _is_own(value, module)",
    ): "names for a hint in an error; constants are rarely close to the name of a function",
    (
        "core/own_code.py",
        "linecache.checkcache(str(path))  # tracebacks show the lines of this version",
        ANY,
    ): "the text of a traceback",
    (
        "core/own_code.py",
        'exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)',
        ANY,
    ): "the only flag to inherit is that annotations are not evaluated",
    (
        "methods/fedala.py",
        "count = max(1, int(self.share * len(examples)))",
        "1 -> 2",
    ): "the least number of examples of a tiny client",
    (
        "methods/fedala.py",
        "grads: Sequence[Tensor] = torch.autograd.grad(loss, list(live.values()), materialize_grads=True)",
        ANY,
    ): "the loss of the tests' models depends on every mixed parameter",
    (
        "methods/fedadamw.py",
        "ages = {name: torch.zeros((), dtype=torch.int64, device=value.device) "
        "for name, value in model.initial.items()}",
        "torch.zeros(...) without dtype=torch.int64",
    ): "whole numbers in any type, until a float32 no longer holds them",
    (
        "methods/robust.py",
        "shares = torch.tensor([weights[sender] for sender in senders], dtype=torch.float64, device=table.device)",
        "torch.tensor(...) without dtype=torch.float64",
    ): "how weights are rounded",
    (
        "methods/robust.py",
        'distances = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()',
        "torch.cdist(...) without compute_mode='donot_use_mm_for_euclid_dist'",
    ): "how distances of more than 25 clients are rounded",
    (
        "methods/robust.py",
        "return nearest.sum(1).argsort(stable=True)",
        ANY,
    ): "torch sorts a few scores stably in any case",
    (
        "core/hub.py",
        'return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)',
        "parts.hostname or '' -> parts.hostname",
    ): "an endpoint without a host is refused either way",
    (
        "core/hub.py",
        "probe = threading.Thread(target=lambda: answered.append(_connects(host, port)), daemon=True)",
        ANY,
    ): "whether a lookup that hangs keeps the process from ending",
    (
        "core/update_checks.py",
        "warnings.warn(",
        "warnings.warn(...) without stacklevel=2",
    ): "which line the warning points at",
    (
        "core/update_checks.py",
        "stacklevel=2,",
        "2 -> 3",
    ): "which line the warning points at",
    (
        "core/update_checks.py",
        "steps = dict.fromkeys(narrowed.train, 1)",
        "1 -> 2",
    ): "only which slots a rule sends is asked, and no rule decides that by how many steps were taken",
    (
        "core/memory.py",
        "return 2**63",
        ANY,
    ): "any number stands for no limit if it is more than a machine can have",
    (
        "core/chacha.py",
        "keys, counts = [bytes(range(start, start + KEY_BYTES)) for start in (0, 7)], [321, 8]",
        ANY,
    ): "which keys, and how many of their numbers, are compared with a GPU's is a choice",
    (
        "privacy/accountant.py",
        "share = Fraction(release.share).limit_denominator(10**9)",
        ANY,
    ): "a share to more digits than any cohort has",
    (
        "privacy/membership.py",
        "return float(brentq(excess, 0.0, high, xtol=1e-6))",
        "brentq(...) without xtol=1e-06",
    ): "a bound to more digits than a millionth; nobody relies on them",
}
