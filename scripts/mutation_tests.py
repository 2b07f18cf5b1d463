"""Which files are mutated, and which tests hold them."""

from __future__ import annotations

from trials import PACKAGE, ROOT

CONFORMANCE = "tests/testing/test_conformance.py::test_every_method_and_supported_composition_conforms"
LAWS = ("tests/laws/test_theorems.py", "tests/laws/test_reductions.py")

MUTATED = ("core", "training", "storage", "compression", "methods", "privacy", "secure_aggregation")
# Files that no test on a CPU can hold, or that compute nothing that a run relies on.
LEFT_OUT = {
    "training/cuda_graphs.py": "it captures and replays programs of a GPU; a CPU never runs most of it",
    "core/__init__.py": "nothing in it",
    "core/method_error.py": "nothing in it but an error",
    "compression/__init__.py": "nothing in it but an error",
    "privacy/__init__.py": "nothing in it",
    "secure_aggregation/__init__.py": "nothing in it but an explanation",
    "storage/__init__.py": "nothing in it",
    "training/compilation.py": "it compiles for a GPU; the tests on a CPU are slow and exercise one path",
    "training/__init__.py": "nothing in it",
    "methods/cards.py": "it reads the cards, which tests/project/test_cards.py holds",
    "methods/__init__.py": "an index, which tests/core/test_options.py and the conformance tests hold",
}

LEARNING = (
    "tests/core/test_client_rounds.py",
    "tests/training/test_unequal_clients.py",
    "tests/laws/test_reductions.py",
)
ROUNDS = ("tests/core/test_rounds.py", "tests/storage/test_checkpoint.py", "tests/core/test_laws_of_small_parts.py")
PRIVATE = ("tests/training/test_dp_sgd.py", "tests/training/test_ghost_clipping.py")
GHOST = ("tests/training/test_ghost_blocks.py", "tests/training/test_ghost_clipping.py")
DROPOUT = "tests/training/test_training_with_dropout.py"
GRAPHS = "tests/training/test_cuda_graphs.py"
AUDIT = ("tests/privacy/test_mechanism.py", "tests/privacy/test_mechanism_replay.py")
SECURE = tuple(
    f"tests/secure_aggregation/test_secure_{part}.py" for part in ("protocol", "parts", "attacks", "eligibility")
)
NOISE_AT_CLIENTS = ("tests/secure_aggregation/test_client_vector.py", "tests/privacy/test_noise_at_clients.py")
DETAILS = ("tests/core/test_details.py",)
COST = ("tests/privacy/test_budget.py", "tests/privacy/test_client_level.py")

# What a core or privacy file is held by: of these tests, those that run its lines.
HELD_BY: dict[str, tuple[str, ...]] = {
    "training/phase_trainer.py": (
        "tests/training/test_phase_trainer.py",
        *LEARNING,
        "tests/core/test_packed.py",
        f"{GRAPHS}::test_rounds_with_graphs_equal_eager_rounds",
        f"{GRAPHS}::test_results_are_not_overwritten_by_a_later_replay",
    ),
    "training/augmentation.py": ("tests/training/test_augmentation.py",),
    "training/phase_work.py": ("tests/training/test_phase_work.py",),
    "training/client_axis.py": ("tests/training/test_client_axis.py",),
    "training/objective.py": ("tests/training/test_objective.py",),
    "training/gradients.py": (
        "tests/training/test_objective.py",
        "tests/training/test_accumulated_gradients.py",
        "tests/training/test_rule_gradients.py",
    ),
    "training/rule_gradients.py": ("tests/training/test_rule_gradients.py",),
    "training/parameter_groups.py": ("tests/training/test_parameter_groups.py",),
    "training/private_gradients.py": (
        "tests/training/test_private_gradients.py",
        "tests/training/test_captured_privacy.py",
        *PRIVATE,
        GHOST[0],
    ),
    **{
        f"secure_aggregation/{file}.py": SECURE
        for file in (
            "client",
            "costs",
            "eligibility",
            "encoding",
            "fixed_point",
            "groups",
            "key_agreement",
            "masks",
            "messages",
            "neighbors",
            "round_setup",
            "secret_sharing",
            "server",
            "signatures",
        )
    },
    "core/secure_settings.py": (SECURE[1],),
    "core/finite_server.py": ("tests/core/test_rounds.py",),
    "core/client_noise.py": ("tests/privacy/test_noise_at_clients.py",),
    "core/discrete_gaussian.py": ("tests/core/test_discrete_gaussian.py",),
    "methods/layer_votes.py": ("tests/methods/test_layer_votes.py",),
    "privacy/noise_at_clients.py": NOISE_AT_CLIENTS,
    "privacy/mechanism_client_noise.py": ("tests/engines/test_secure_noise.py",),
    "secure_aggregation/client_vector.py": NOISE_AT_CLIENTS[:1],
    "core/hub.py": ("tests/core/test_hub.py",),
    "core/keyed_bits.py": ("tests/core/test_keyed_bits.py",),
    "core/layer_compiler.py": ("tests/core/test_outside_vmap.py",),
    "core/outside_vmap.py": ("tests/core/test_outside_vmap.py",),
    "core/averaging.py": ("tests/core/test_averaging.py",),
    "core/traffic.py": ("tests/core/test_traffic.py", "tests/core/test_rounds.py"),
    "core/update.py": ("tests/core/test_update_checks.py",),
    "core/chacha.py": ("tests/core/test_chacha.py", "tests/core/test_noise_attack.py"),
    "storage/checkpoint.py": (
        "tests/storage/test_checkpoint.py",
        "tests/storage/test_initial_values.py",
        "tests/storage/test_best.py",
    ),
    "storage/initial_values.py": ("tests/storage/test_initial_values.py",),
    "core/drift.py": ("tests/core/test_drift.py", "tests/core/test_packed.py"),
    "storage/atomic_files.py": ("tests/storage/test_atomic_files.py",),
    "storage/chained_lines.py": ("tests/site/test_site_log.py", "tests/privacy/test_ledger.py"),
    "storage/processes.py": ("tests/storage/test_processes.py",),
    "training/ghost_clipping.py": GHOST,
    "training/ghost_layers.py": GHOST,
    "training/cuda_capture.py": ("tests/training/test_cuda_capture.py",),
    "training/captured_forward.py": ("tests/training/test_captured_forward.py",),
    "training/step_noise.py": ("tests/training/test_captured_privacy.py",),
    "training/local_training.py": (
        "tests/training/test_local_training.py",
        *LEARNING,
        "tests/training/test_dp_sgd.py",
        "tests/core/test_packed.py",
    ),
    "core/client.py": ("tests/core/test_client.py", "tests/core/test_client_rounds.py"),
    "core/batch_schedule.py": ("tests/core/test_batch_schedule.py", "tests/core/test_client.py"),
    "core/group_units.py": ("tests/training/test_group_units.py",),
    "core/data.py": ("tests/core/test_client_rounds.py", "tests/data/test_text_lengths.py"),
    "core/dp_settings.py": PRIVATE,
    "core/noise.py": ("tests/core/test_chacha.py",),
    "core/cuda_kernels.py": ("tests/core/test_chacha.py",),
    "training/ghost_kernels.py": ("tests/training/test_ghost_blocks.py",),
    "core/versions.py": ("tests/core/test_laws_of_small_parts.py",),
    "core/memory.py": ("tests/core/test_memory.py",),
    **dict.fromkeys(
        ("core/method.py", "core/client_rule.py", "core/update_transform.py", "core/server_rule.py", "core/compose.py"),
        (
            *DETAILS,
            "tests/core/test_laws_of_small_parts.py",
            "tests/core/test_rounds.py",
            "tests/core/test_client_rounds.py",
            "tests/training/test_dp_sgd.py",
        ),
    ),
    "core/model.py": ("tests/core/test_model.py",),
    "core/optim.py": ("tests/core/test_optim.py",),
    "core/own_code.py": ("tests/core/test_own_code.py",),
    "core/registry.py": ("tests/core/test_own_code.py",),
    "core/options.py": ("tests/core/test_option_types.py", "tests/core/test_options.py"),
    "core/personal_copy.py": ("tests/core/test_personal_copy.py", "tests/experiment/test_new_classes.py"),
    "core/plan.py": (*DETAILS, "tests/core/test_laws_of_small_parts.py"),
    "training/dp_sgd.py": ("tests/training/test_private_gradients.py", *PRIVATE),
    "core/update_checks.py": (
        "tests/core/test_update_checks.py",
        "tests/core/test_rounds.py",
        "tests/core/test_hostile_updates.py",
    ),
    "core/rng.py": ("tests/core/test_rng.py", "tests/core/test_chacha.py", "tests/core/test_laws_of_small_parts.py"),
    "core/rounds.py": (*DETAILS, *ROUNDS, "tests/engines/test_availability.py"),
    "core/packed.py": (*DETAILS, "tests/core/test_packed.py", "tests/core/test_laws_of_small_parts.py"),
    "core/sharing.py": ("tests/core/test_sharing.py",),
    "core/settings.py": ("tests/core/test_settings.py", "tests/core/test_sampling.py"),
    "core/sampling.py": ("tests/core/test_sampling.py",),
    "training/batch_shapes.py": ("tests/training/test_batch_shapes.py",),
    "training/padding_meter.py": ("tests/training/test_batch_shapes.py",),
    "training/batching.py": (
        "tests/training/test_batch_shapes.py",
        "tests/training/test_unequal_clients.py",
        "tests/training/test_dp_sgd.py",
        f"{DROPOUT}::test_blocks_equal_single_clients",
        f"{DROPOUT}::test_seeds_come_from_the_key_of_client_round_and_phase",
        "tests/data/test_large_data.py::test_next_batch_is_decoded_ahead",
    ),
    "core/torch_private.py": ("tests/core/test_torch_private.py",),
    "storage/client_store.py": (*DETAILS, "tests/storage/test_checkpoint.py", "tests/storage/test_best.py"),
    "storage/png.py": ("tests/storage/test_png.py",),
    "storage/safe_text.py": ("tests/storage/test_safe_text.py",),
    "core/tensors.py": ("tests/core/test_tensors.py", "tests/core/test_laws_of_small_parts.py"),
    "core/serialization.py": ("tests/core/test_laws_of_small_parts.py", "tests/core/test_packed.py"),
    "privacy/accountant.py": ("tests/privacy/test_accountant.py", "tests/privacy/test_ledger.py"),
    "privacy/membership.py": ("tests/privacy/test_membership.py",),
    "privacy/canaries.py": ("tests/privacy/test_canaries.py", "tests/privacy/test_group_audit.py"),
    "privacy/ledger.py": ("tests/privacy/test_ledger.py",),
    "privacy/statement.py": ("tests/privacy/test_statement.py",),
    "privacy/budget.py": COST[:1],
    "privacy/client_level.py": COST[1:],
    "privacy/disclosure.py": ("tests/privacy/test_disclosure.py",),
    "privacy/evidence.py": ("tests/privacy/test_evidence.py",),
    "privacy/guard.py": (*DETAILS, *COST),
    "privacy/spending.py": COST[:1],
    "privacy/mechanism.py": AUDIT,
    "privacy/mechanism_choice.py": AUDIT,
    "privacy/mechanism_clients.py": AUDIT,
    "privacy/secret.py": ("tests/privacy/test_secret.py",),
}

# Every file of methods and compression is held by the test file of its name, tests/methods/test_<file>.py for example,
# and by the lines of its methods in the conformance test; some by more than that.
OF_METHODS = ("methods", "compression")
MORE_TESTS: dict[str, tuple[str, ...]] = {
    "compression/prune.py": ("tests/compression/test_compression.py",),
    "compression/quantize.py": ("tests/compression/test_compression.py",),
    "methods/centralized.py": LAWS,
    "methods/fedavg.py": LAWS,
    "methods/fedfrozen.py": (*LAWS, "tests/methods/test_auto_warmup.py", "tests/methods/test_adapter_compositions.py"),
    "methods/feddyn.py": ("tests/methods/test_client_weights.py",),
    "methods/scaffold.py": ("tests/methods/test_client_weights.py",),
    "methods/ffa_lora.py": ("tests/methods/test_adapter_compositions.py",),
    "methods/fedsa_lora.py": ("tests/methods/test_adapter_compositions.py",),
    "methods/fedprox.py": LAWS,
    "methods/local_only.py": LAWS,
}


def known() -> list[str]:
    """The files that are mutated."""
    found = [f"{part}/{path.name}" for part in MUTATED for path in (PACKAGE / part).glob("*.py")]
    return sorted(set(found) - LEFT_OUT.keys())


def tests_of(file: str) -> tuple[str, ...]:
    """Files of tests, and single tests."""
    from partita.methods import INDEX

    part, _, name = file.partition("/")
    if part not in OF_METHODS:
        return HELD_BY.get(file, ())
    own = f"tests/{part}/test_{name}"
    place = f"partita.{part}.{name.removesuffix('.py')}:"
    conform = [f"{CONFORMANCE}[{each}]" for each, where in INDEX.items() if where.startswith(place)]
    return (*([own] if (ROOT / own).exists() else []), *MORE_TESTS.get(file, ()), *conform)
