"""docs/benchmarks.md's list of commands: what measures what, and which result it writes."""

from __future__ import annotations

from report_tables import table

LAB = "[lab/training.md](lab/training.md)"
BENCH, DEMO, HAND = "`make bench`", "`make bench-demo`", "by hand"

# Command, what it measures, its file in benchmarks/results/, what runs it.
COMMANDS = (
    ("build/bin/bench_kernels", "CPU kernels beside copies", "cpu_scan.json", BENCH),
    ("build/bin/bench_ops", "the C++ ops beside copies", "not kept", BENCH),
    ("build/bin/bench_models", "models' steps", "models_h200.json, models_cpu.json", BENCH),
    ("baselines.py --groups aims extra", "scans beside libraries", "baselines_h200.json", BENCH),
    (
        "baselines.py --groups sweep",
        "hgru at twelve more shapes",
        "baselines_sweep_h200.json",
        BENCH,
    ),
    (
        "baselines.py --groups gla",
        "gated linear attention beside fla",
        "baselines_gla_h200.json",
        BENCH,
    ),
    (
        *("baselines.py --groups attention", "forgetting attention beside libraries"),
        *("baselines_attention_h200.json", BENCH),
    ),
    ("gla_errors.py", "the error of the decays' gradient", "gla_errors_h200.json", BENCH),
    ("gated_rnn.py", "gated_rnn beside cuDNN's GRU and a loop", "gated_rnn_h200.json", BENCH),
    ("copying_step.py", "a training step beside a loop", "copying_step_h200.json", BENCH),
    ("cpu_loops.py", "ops on the CPU beside loops", "cpu_loops.json", HAND),
    ("gla_cpu.py", "gated linear attention on the CPU", "cpu_gla.json", HAND),
    ("attention_cpu.py", "forgetting attention on the CPU", "cpu_attention.json", HAND),
    ("fox_text.py", "forgetting attention on real text", "fox_text_h200.json, fox_text/", HAND),
    ("gate_init.py", f"how gates start ({LAB})", "gate_init_h200.json", HAND),
    ("mqar.py", f"associative recall ({LAB})", "mqar_h200.json", HAND),
    ("demo.py", "the demo beside other models", "demo.json", DEMO),
)


def commands_section() -> list[str]:
    """One row a command."""

    def row_of(command: str, what: str, files: str, run: str) -> list[str]:
        if not command.startswith("build/"):
            command = f"benchmarks/{command}"
        names = files if files == "not kept" else f"`{files.replace(', ', '`, `')}`"
        return [f"`{command}`", what, names, run]

    note = (
        "Each script's head says how it is called; `--out` or `--json` names the file to write. "
        "What `make bench` writes goes to `local/` there, until it is copied. Of the Google "
        "Benchmarks' files, `cpu_scan.json` is the `cpu/hgru` of `bench_kernels.json`. Libraries "
        "that are not installed are left out; the Forgetting Transformer's own kernel is a file "
        "that `TIDEGATE_PAPER_KERNEL` or `--paper-kernel` names."
    )
    head = ("command", "what", "result in `benchmarks/results/`", "run")
    return [*table(head, (row_of(*row) for row in COMMANDS)), "", note, ""]
