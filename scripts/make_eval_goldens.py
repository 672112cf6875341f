"""Writes tests/evals/golden.json: what lm-eval's hf backend makes of the demo model on the tasks of the tests.

    PYTHONPATH=.:tests python scripts/make_eval_goldens.py export --folder=NEW_FOLDER
    python scripts/make_eval_goldens.py run --folder=THE_SAME

The first command needs photon_jax and writes the model as Hugging Face folders, one for each kind of tokenizer; the
second needs photon_jax's sources and lm-eval[hf] (torch, transformers), in an environment of its own.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATING = ("photon_generate", "photon_chat")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from helpers.eval_runs import GOLDEN_PATH, RUNS, EvalRun, evaluate, variant_of  # noqa: E402


def export(folder: Path, model: str) -> None:
    """Writes float32 weights once, and beside links to them each variant of the tokenizer."""
    from helpers.tiny_checkpoint import write_checkpoint

    from photon_jax.checkpoint.load import load_checkpoint
    from photon_jax.text.gguf_tokenizer import read_gguf_fields
    from photon_jax.text.write_tokenizer import tokenizer_files

    loaded = load_checkpoint(model, dtype="float32")
    weights = write_checkpoint(folder / "weights", params=loaded.params, config=loaded.config, tokenizer_config=None)
    shape = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    (weights / "config.json").write_text(json.dumps(shape | {"model_type": "llama"}), encoding="utf-8")
    for variant in dict.fromkeys(run.variant for run in RUNS.values()):
        target = folder / variant
        target.mkdir()
        for file in weights.iterdir():
            os.link(file, target / file.name)
        parts = variant_of(read_gguf_fields(loaded.tokenizer_source), variant)
        files = tokenizer_files(parts)
        config = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (target / "tokenizer.json").write_bytes(files["tokenizer.json"])
        (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def run_all(folder: Path) -> None:
    """Evaluates each run and writes the golden file."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    golden = {}
    for name, run in RUNS.items():
        golden[name] = evaluate_run(folder, run)
        print(name, json.dumps({task: found["metrics"] for task, found in golden[name].items()}), flush=True)
    GOLDEN_PATH.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def evaluate_run(folder: Path, run: EvalRun) -> dict[str, object]:
    """Returns for each task of a run the metrics, and what each request gave."""
    from lm_eval.models.huggingface import HFLM

    window = {} if run.max_length is None else {"max_length": run.max_length}
    model = HFLM(str(folder / run.variant), device="cpu", dtype="float32", batch_size=1, **window)
    found = {}
    for task, limit in run.limits.items():
        # alone: in a batch hf goes on after an answer's end until the last one ends, and may keep what came then
        model.batch_size_per_gpu = 1 if task in GENERATING else 8
        found[task] = evaluate(model, task, limit, apply_chat_template=run.has_chat_template)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["export", "run"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default="demo", help="GGUF file to export")
    arguments = parser.parse_args()
    if arguments.command == "export":
        export(arguments.folder, arguments.model)
    else:
        run_all(arguments.folder)


if __name__ == "__main__":
    main()
