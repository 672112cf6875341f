"""Times lm-evaluation-harness on four-way questions: our model class beside its own hf backend, in turn.

    PYTHONPATH=. python scripts/bench_lm_eval.py --questions=QUIZ.jsonl --hf_folder=FOLDER
        --photon_python=.venv/bin/python

Run it where lm-eval[hf] is; --photon_python is the interpreter of an environment with photon_jax and lm-eval. The
folder holds the same model in Hugging Face's layout (scripts/make_eval_goldens.py export makes one). Questions are
numbered, so that none is asked twice; each has a context and four continuations. Prints the seconds of each round, and
questions a second.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def read_requests(path, first, count):
    """Returns the harness's requests of so many questions; those of the file are repeated under new numbers."""
    from lm_eval.api.instance import Instance

    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    requests = []
    for number in range(first, first + count):
        row = rows[number % len(rows)]
        context = f"Question {number + 1}: {row['question']}\nAnswer:"
        for index, choice in enumerate(row["choices"]):
            arguments = (context, f" {choice}")
            requests.append(
                Instance("loglikelihood", doc={}, arguments=arguments, idx=index, metadata=("quiz", number, 1))
            )
    return requests


def best_choices(answers):
    return [max(range(4), key=lambda index: answers[at + index][0]) for at in range(0, len(answers), 4)]


def serve(flags):
    """Answers rounds that are asked for on standard input, until it ends."""
    from photon_jax.evals.lm_eval_model import PhotonLM

    model = PhotonLM(flags.model, dtype="float32", linear=flags.linear, max_model_len=512, progress=False)
    for line in sys.stdin:
        first, count = map(int, line.split())
        requests = read_requests(flags.questions, first, count)
        started = time.perf_counter()
        answers = model.loglikelihood(requests, disable_tqdm=True)
        print(json.dumps({"seconds": time.perf_counter() - started, "choices": best_choices(answers)}), flush=True)


class Photon:
    """Our side, in a process of its own: the two need different environments."""

    def __init__(self, flags, linear):
        self.name = f"photon_jax, linear={linear}"
        command = [flags.photon_python, __file__, "--serve", "--questions", flags.questions, "--model", flags.model]
        self._process = subprocess.Popen(
            [*command, "--linear", linear], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, first, count):
        self._process.stdin.write(f"{first} {count}\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith('{"seconds"'):
            assert line, "the photon_jax process ended"
        found = json.loads(line)
        return found["seconds"], found["choices"]

    def close(self):
        self._process.stdin.close()
        self._process.wait()


class HuggingFace:
    def __init__(self, flags, batch_size):
        from lm_eval.models.huggingface import HFLM

        self.name = f"hf, batch_size={batch_size}"
        self._flags = flags
        self._model = HFLM(flags.hf_folder, device="cpu", dtype="float32", batch_size=batch_size)

    def run(self, first, count):
        requests = read_requests(self._flags.questions, first, count)
        started = time.perf_counter()
        answers = self._model.loglikelihood(requests, disable_tqdm=True)
        return time.perf_counter() - started, best_choices(answers)

    def close(self):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--hf_folder")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--photon_python", default=sys.executable)
    parser.add_argument("--batch_sizes", default="4,16,64", help="of hf")
    parser.add_argument("--num_questions", type=int, default=1000)
    parser.add_argument("--num_rounds", type=int, default=5)
    parser.add_argument("--linear", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        serve(flags)
        return
    sides = [Photon(flags, linear) for linear in ("auto", "xla")]
    sides += [HuggingFace(flags, int(size)) for size in flags.batch_sizes.split(",")]
    count = flags.num_questions // flags.num_rounds
    seconds = {side.name: [] for side in sides}
    for side in sides:
        side.run(flags.num_questions, 16)  # compiles, touches the weights
    for index in range(flags.num_rounds):
        chosen = {}
        for side in sides:
            taken, chosen[side.name] = side.run(index * count, count)
            seconds[side.name].append(taken)
            print(f"round {index}: {side.name}: {taken:.2f} s", flush=True)
        reference = chosen[sides[-1].name]
        for name, choices in chosen.items():
            num_equal = sum(a == b for a, b in zip(choices, reference, strict=True))
            assert num_equal >= count - 1, f"{name} chose as hf for {num_equal} of {count} questions"
    for name, taken in seconds.items():
        print(f"| {name} | {count / statistics.median(taken):.1f} questions/s | {sum(taken):.1f} s |")
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
