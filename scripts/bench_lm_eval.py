"""Times lm-evaluation-harness on four-way questions: our model class beside its own hf backend, in turn.

    PYTHONPATH=. python scripts/bench_lm_eval.py --questions=QUIZ.jsonl --hf_folder=FOLDER --num_fewshot=0,5
        --photon_python=.venv/bin/python

Run it where lm-eval[hf] is; --photon_python is the interpreter of an environment with photon_jax and lm-eval. The
folder holds the same model in Hugging Face's layout (scripts/make_eval_goldens.py export makes one). A line of the file
has question, choices and label. The first lines are the few-shot examples, the same before each question; of the others
each is asked before one is asked again, under another number. Prints the seconds of each round, wall clock and
processor time of the process, and questions a second.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


def read_requests(path, first, count, num_fewshot):
    """Returns the harness's requests of so many questions, four to a question."""
    from lm_eval.api.instance import Instance

    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    examples, rows = rows[:num_fewshot], rows[num_fewshot:]
    head = "".join(f"{ask(index, row)} {row['choices'][row['label']]}\n\n" for index, row in enumerate(examples))
    requests = []
    for number in range(first, first + count):
        row = rows[number % len(rows)]
        context = head + ask(num_fewshot + number, row)
        for index, choice in enumerate(row["choices"]):
            arguments = (context, f" {choice}")
            requests.append(
                Instance("loglikelihood", doc={}, arguments=arguments, idx=index, metadata=("quiz", number, 1))
            )
    return requests


def ask(index, row):
    return f"Question {index + 1}: {row['question']}\nAnswer:"


def timed_answers(model, requests):
    """Returns wall-clock and processor seconds, and which choice of each question is the likeliest."""
    started, used = time.perf_counter(), processor_seconds()
    answers = model.loglikelihood(requests, disable_tqdm=True)
    taken = time.perf_counter() - started, processor_seconds() - used
    return taken, best_choices(answers)


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def best_choices(answers):
    return [max(range(4), key=lambda index: answers[at + index][0]) for at in range(0, len(answers), 4)]


def serve(flags):
    """Answers rounds that are asked for on standard input, until it ends."""
    from photon_jax.evals.lm_eval_model import PhotonLM

    model = PhotonLM(flags.model, dtype="float32", linear=flags.linear, max_model_len=512, progress=False)
    for line in sys.stdin:
        seconds, choices = timed_answers(model, read_requests(flags.questions, *map(int, line.split())))
        print(json.dumps({"seconds": seconds, "choices": choices}), flush=True)


class Photon:
    """Our side, in a process of its own: the two need different environments."""

    def __init__(self, flags, linear):
        self.name = f"photon_jax, linear={linear}"
        command = [flags.photon_python, __file__, "--serve", "--questions", flags.questions, "--model", flags.model]
        self._process = subprocess.Popen(
            [*command, "--linear", linear], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, first, count, num_fewshot):
        self._process.stdin.write(f"{first} {count} {num_fewshot}\n")
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
        self._questions = flags.questions
        self._model = HFLM(flags.hf_folder, device="cpu", dtype="float32", batch_size=batch_size)

    def run(self, first, count, num_fewshot):
        return timed_answers(self._model, read_requests(self._questions, first, count, num_fewshot))

    def close(self):
        pass


def compare(sides, flags, num_fewshot):
    """Runs the rounds and prints a table."""
    count = flags.num_questions // flags.num_rounds
    seconds = {side.name: [] for side in sides}
    for side in sides:
        for size in (48, 2):  # compiles large and small steps, touches the weights
            side.run(flags.num_questions + size, size, num_fewshot)
    for index in range(flags.num_rounds):
        chosen = {}
        for side in sides:
            taken, chosen[side.name] = side.run(index * count, count, num_fewshot)
            seconds[side.name].append(taken)
            print(f"round {index}, {num_fewshot}-shot: {side.name}: {taken[0]:.2f} s, cpu {taken[1]:.2f}", flush=True)
        reference = chosen[sides[-1].name]
        for name, choices in chosen.items():
            num_equal = sum(a == b for a, b in zip(choices, reference, strict=True))
            assert num_equal >= count - 1, f"{name} chose as hf for {num_equal} of {count} questions"
    print(f"\n| {num_fewshot}-shot | questions/s | {count * flags.num_rounds} questions, s | processor time, s |")
    print("| --- | --- | --- | --- |")
    for name, taken in seconds.items():
        clock, used = zip(*taken, strict=True)
        print(f"| {name} | {count / statistics.median(clock):.1f} | {sum(clock):.1f} | {sum(used):.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--hf_folder")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--photon_python", default=sys.executable)
    parser.add_argument("--batch_sizes", default="4,16,64", help="of hf")
    parser.add_argument("--num_questions", type=int, default=1000)
    parser.add_argument("--num_rounds", type=int, default=5)
    parser.add_argument("--num_fewshot", default="0", help="examples before each question; 0,5 runs both")
    parser.add_argument("--linear", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        serve(flags)
        return
    sides = [Photon(flags, linear) for linear in ("auto", "xla")]
    sides += [HuggingFace(flags, int(size)) for size in flags.batch_sizes.split(",")]
    for num_fewshot in map(int, flags.num_fewshot.split(",")):
        compare(sides, flags, num_fewshot)
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
