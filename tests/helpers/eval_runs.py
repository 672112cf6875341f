"""Evaluations that the golden file tests/evals/golden.json holds, each made by lm-eval's own hf backend.

The script that makes the file and the tests that compare with it read the list here.
"""

import dataclasses
from pathlib import Path

import tokenizers

from photon_jax.text.tokenizer_parts import TokenizerParts

TASKS_FOLDER = Path(__file__).parents[1] / "evals/tasks"
GOLDEN_PATH = Path(__file__).parents[1] / "evals/golden.json"
BOS, EOS = "<|im_start|>", "<|im_end|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRun:
    """One call of the harness on the demo model.

    Attributes:
      variant: of the tokenizer, see `variant_of`.
      limits: task -> how many of its documents, None for all.
      max_length: window of the model, None for its own.
      has_chat_template: whether prompts are written out as conversations.
    """

    variant: str
    limits: dict[str, int | None]
    max_length: int | None = None
    has_chat_template: bool = False


RUNS = {
    "plain": EvalRun(
        variant="plain",
        limits={"photon_choice": None, "photon_letters": None, "photon_generate": 12, "photon_rolling": None},
    ),
    "window": EvalRun(variant="plain", limits={"photon_edges": None, "photon_rolling": None}, max_length=64),
    "narrow": EvalRun(variant="plain", limits={"photon_choice": 8, "photon_generate": 8}, max_length=24),
    "no_bos": EvalRun(
        variant="no_bos",
        limits={"photon_edges": None, "photon_rolling": None, "photon_generate": 2},
        max_length=64,
    ),
    "adds_bos": EvalRun(
        variant="adds_bos",
        limits={"photon_edges": None, "photon_rolling": None, "photon_generate": 2},
        max_length=64,
    ),
    "chat": EvalRun(variant="plain", limits={"photon_chat": 8, "photon_letters": 8}, has_chat_template=True),
    "chat_adds_bos": EvalRun(
        variant="adds_bos", limits={"photon_chat": 2, "photon_letters": 2}, has_chat_template=True
    ),
}


def variant_of(parts: TokenizerParts, name: str) -> TokenizerParts:
    """Returns a tokenizer that is as it came ("plain"), declares no BOS, or begins each text with one."""
    if name == "no_bos":
        special = {key: text for key, text in parts.special_tokens.items() if key != "bos_token"}
        return dataclasses.replace(parts, special_tokens=special, bos_token_id=None)
    if name == "adds_bos":
        backend = tokenizers.Tokenizer.from_str(parts.backend.to_str())
        bos = (BOS, backend.token_to_id(BOS))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
        )
        return dataclasses.replace(parts, backend=backend, add_bos=None)
    return parts


def evaluate(model: object, task: str, limit: int | None, **arguments: object) -> dict[str, object]:
    """Returns the metrics of a task, and what each request of each of its documents gave."""
    import lm_eval

    results = lm_eval.simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
        **arguments,
    )
    metrics = {key: value for key, value in results["results"][task].items() if isinstance(value, float)}
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return {"metrics": metrics, "samples": [[values[0] for values in sample["resps"]] for sample in samples]}
