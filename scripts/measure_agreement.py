"""Shows what int8 makes of a model's own answers: where the likeliest token stays, and the text that runs freely.

  PYTHONPATH=. python scripts/measure_agreement.py --model=demo --group_size=64

Each prompt is continued greedily in float32. The int8 model then scores these tokens, each after the float32 ones
before it, and continues the prompt by itself.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import photon_jax

GOLDEN = Path(__file__).parents[1] / "tests/models/golden/smollm2.json"


def main() -> None:
    """Prints for each prompt both texts and the agreement, and the agreement over all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--group_size", type=int, default=64)
    parser.add_argument("--kv_dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--max_tokens", type=int, default=64)
    flags = parser.parse_args()
    prompts = [case["prompt"] for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["generations"]]
    params = photon_jax.SamplingParams(temperature=0.0, max_tokens=flags.max_tokens, ignore_eos=True)
    settings = {"dtype": "float32", "max_num_seqs": len(prompts), "max_model_len": 512}
    with photon_jax.LLM(flags.model, **settings) as llm:
        token_ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        expected = [output.outputs[0] for output in llm.generate(token_ids, params)]
    settings |= {"quantization": "int8", "group_size": flags.group_size, "kv_dtype": flags.kv_dtype}
    with photon_jax.LLM(flags.model, **settings) as llm:
        scores = llm.score(token_ids, [list(completion.token_ids) for completion in expected])
        found = [output.outputs[0] for output in llm.generate(token_ids, params)]
    for prompt, score, before, after in zip(prompts, scores, expected, found, strict=True):
        print(f"--- {prompt!r}: {np.mean(score.is_greedy):.1%} the same after the same tokens")
        print(f"float32: {before.text!r}\nint8:    {after.text!r}")
    agreement = np.mean(np.concatenate([score.is_greedy for score in scores]))
    num_equal = sum(before.token_ids == after.token_ids for before, after in zip(expected, found, strict=True))
    print(f"same likeliest token at {agreement:.2%} of {sum(len(s.is_greedy) for s in scores)} positions;", end=" ")
    print(f"{num_equal} of {len(prompts)} texts are equal to the end")


if __name__ == "__main__":
    main()
