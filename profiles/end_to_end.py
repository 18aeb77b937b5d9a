"""Train a model on real text with needles, generate from it, and evaluate it: each step a command.

    python profiles/end_to_end.py --gpu --out OUT      one GPU, sequences of 64K
    python profiles/end_to_end.py --cpu --out OUT      two CPU cores, the default model
    python profiles/end_to_end.py --toy --out OUT      seconds

The text is the Python code of the installed packages; whole packages are held out. Every step is a
command of mtrain. Its line, seconds and last lines are printed. A failed step does not end the
script, and the exit code is then 1. OUT gets end_to_end.md, commands.log, results.jsonl,
report.html, and with Pillow needles.png and perplexity.png.

With --gpu and --toy, a base learns to find needles in short sequences, and a second training
stretches it by YaRN. Both are dense. With --cpu there is one training.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from end_to_end_presets import CODE, HELD_OUT, PRESETS, SHORT, Preset, Training

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_OF_PACKAGE = 4 << 20  # characters
EVERY = 8  # one of this number of packages is held out
PROMPT = 'def read_json(path):\n    """Return the content of a JSON file."""\n'
LEAST_S = 5.0  # for a step to begin
CLEAN_UP_S = 30.0  # for a training that was stopped, to save its checkpoint


@dataclass
class Steps:
    """Runs commands in a folder and keeps what they did.

    rows: (name, seconds, result) of each.
    """

    folder: Path
    out: Path
    limit_s: float
    begin: float = field(default_factory=time.monotonic)
    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def left(self) -> float:
        return self.limit_s - (time.monotonic() - self.begin)

    def run(self, name: str, *words: str, limit_s: float | None = None, lines: int = 0) -> str:
        """Run a command of mtrain. Print its line, its seconds and its last lines; return stdout.

        Args:
            limit_s: most seconds; then it is interrupted.
            lines: number of last lines to print; if the command fails, at least 6.
        """
        shown = shlex.join(["mtrain", *words])
        print(f"\n$ {shown}", flush=True)
        if self.left() < LEAST_S:
            self.rows.append((name, 0.0, "no time left"))
            return ""
        limit = max(1.0, min(limit_s or self.left(), self.left()))
        begin, log = time.monotonic(), self.out / "commands.log"
        with log.open("a") as file:
            file.write(f"\n$ {shown}\n")
            file.flush()
            start = log.stat().st_size
            stdout, code = self._wait(["-m", "mtrain_cli", *words], file, limit)
            file.write(stdout)
        seconds = time.monotonic() - begin
        end = "ok" if code == 0 else f"code {code}" + (" (stopped)" if seconds >= limit else "")
        self.rows.append((name, seconds, end))
        if lines or code:
            said = log.read_bytes()[start:].decode(errors="replace").split("\n")
            print("\n".join([line for line in said if line.strip()][-(lines or 6) :]))
        print(f"[{name}: {seconds:.1f} s, {end}]", flush=True)
        return stdout

    def _wait(self, words: Sequence[str], errors: Any, limit: float) -> tuple[str, int]:
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment.setdefault("COLUMNS", "100")
        process = subprocess.Popen(
            [sys.executable, *words], cwd=self.folder, env=environment, stdout=subprocess.PIPE,
            stderr=errors, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            stdout, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # a training then saves a checkpoint
            try:
                stdout, _ = process.communicate(timeout=CLEAN_UP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers
                stdout, _ = process.communicate()
        return stdout, process.returncode


def write_text(folder: Path, characters: int, least: int) -> tuple[int, int]:
    """Write the code of the installed packages, a document each; hold out whole packages.

    Args:
        characters: most to train on. A quarter as many are held out.
        least: characters of a held-out package.

    Returns:
        Characters to train on, and held out.
    """
    wanted, sizes = {CODE: characters, HELD_OUT: characters // 4}, {CODE: 0, HELD_OUT: 0}
    texts: dict[str, list[str]] = {CODE: [], HELD_OUT: []}
    packages = {path.name: path for path in _packages()}
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in packages}
    for name in sorted(packages, key=keys.__getitem__):
        part = HELD_OUT if int(keys[name], 16) % EVERY == 0 else CODE
        most = min(MOST_OF_PACKAGE, wanted[part] // 2)
        if sizes[part] >= wanted[part]:
            continue
        text = "".join(_sources(packages[name], most))
        if len(text) >= (least if part == HELD_OUT else 1):
            texts[part].append(text)
            sizes[part] += len(text)
    for part, lines in texts.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        rows = (json.dumps({"text": text}) + "\n" for text in lines)
        (folder / part / f"{part}.jsonl").write_text("".join(rows))
    return sizes[CODE], sizes[HELD_OUT]


def _packages() -> Iterator[Path]:
    """Yield the folders of the standard library and of the installed packages."""
    torch = importlib.util.find_spec("torch")
    own = [Path(torch.origin).parents[1]] if torch is not None and torch.origin else []
    for root in dict.fromkeys([Path(sysconfig.get_path("stdlib")), *own]):
        for path in root.iterdir():
            if path.is_dir() and path.name not in ("site-packages", "dist-packages", "test"):
                yield path


def _sources(package: Path, most: int) -> Iterator[str]:
    total = 0
    for path in sorted(package.rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield text
        total += len(text)
        if total > most:
            return


def prepare(steps: Steps, preset: Preset) -> None:
    """Make the text and the needles, and tokenize each part to bytes."""
    begin = time.monotonic()
    shutil.rmtree(steps.folder, ignore_errors=True)
    text = steps.folder / "text"
    code, held_out = write_text(text, int(preset.megabytes * 1e6), preset.training.seq + 512)
    seconds = time.monotonic() - begin
    steps.rows.append(("code of the installed packages", seconds, "ok" if held_out else "too few"))
    print(f"text: {code / 1e6:.1f} MB of code, {held_out / 1e6:.1f} MB held out, {seconds:.1f} s")
    for number, (name, each) in enumerate(preset.needles.items()):
        steps.run(
            f"needles of {each.length:,}", "data", "needles", f"text/{name}",
            "--length", str(each.length), "--pairs", str(each.pairs), "--chains", "0",
            "--questions", str(each.questions), "--documents", str(each.documents),
            "--seed", str(11 + number), "--haystack", f"text/{CODE}",
        )  # fmt: skip
    for name in (CODE, *preset.needles):
        steps.run(f"tokens of {name}", "data", "prepare", f"text/{name}", f"store/{name}")


def train(steps: Steps, preset: Preset) -> None:
    """Train the base, if there is one, and the model."""
    base = preset.base
    start: tuple[str, ...] = preset.model
    if base is not None:
        words = (*preset.model, f"model.rope.original_max_position={base.seq}")
        _train(steps, preset, f"train at {base.seq:,}", base, "base", words)
        steps.run("export", "checkpoint", "export", "base", "base-hf", lines=1)
        start = ("train.init_from=base-hf", *preset.yarn)
    seq = preset.training.seq
    _train(steps, preset, f"train at {seq:,}", preset.training, "run", start)


def _train(
    steps: Steps, preset: Preset, name: str, training: Training, folder: str, words: Sequence[str]
) -> None:
    mix = ", ".join(f"{part}: {share:g}" for part, share in training.mix.items())
    sizes = [
        f"seq={training.seq}", f"train.steps={training.steps}",
        f"train.global_batch={training.batch}", f"train.micro_batch={training.batch}",
        f"train.checkpoint_every={max(1, training.steps // 4)}", "train.keep_checkpoints=1",
    ]  # fmt: skip
    data = ["data=tokens", "data.path=store", f"data.mix={{{mix}}}", "data.document_mask=false"]
    steps.run(
        name, "train", *data, *sizes, *words, *training.words, *preset.machine,
        f"run.dir={folder}", limit_s=training.limit_s, lines=9,
    )  # fmt: skip


def question(folder: Path) -> tuple[str, str]:
    """Return the text of a short document up to its last question, and the answer."""
    with (folder / "text" / SHORT / "needles.jsonl").open() as file:
        document = json.loads(file.readline())
    last = document["questions"][-1]
    return document["text"][: last["start"]].rstrip(" "), last["answer"]


def generate(steps: Steps, preset: Preset) -> list[str]:
    """Let the model continue code, and a text that asks for a needle. Return the lines to show."""
    prompts = {"code": PROMPT}
    found: list[str] = []
    try:
        prompts["needle"], answer = question(steps.folder)
    except (OSError, ValueError, LookupError):
        answer = ""
    file = steps.folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts.values()))
    common = ("generate", "run", "--prompt-file", file.name, "--json")
    more = ("--max-new", str(preset.max_new))
    sampled = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "1")
    for kind, options in (("greedy", ()), ("sampled", sampled)):
        stdout = steps.run(f"generate, {kind}", *common, *more, *options)
        for name, text in zip(prompts, _texts(stdout), strict=False):
            if name == "code":
                found.append(f"Code, {kind}:\n\n```text\n{PROMPT}{text}\n```")
            elif answer:
                first = text.strip().split("\n")[0][:40]
                found.append(f"Needle, {kind}: wanted {answer}, got `{first}`")
    print("\n\n".join(found), flush=True)
    return found


def _texts(stdout: str) -> list[str]:
    rows = []
    for line in stdout.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(str(row.get("text", row.get("completion", ""))))
    return rows


def evaluate(steps: Steps, preset: Preset) -> None:
    """Measure perplexity and needles, dense beside vertical_slash, and write the report."""
    held_out = f"text/{HELD_OUT}/{HELD_OUT}.jsonl"
    both = ("--attention", "dense,vertical_slash", "--out", "evaluation", *preset.sparsity)
    device = tuple(word for word in preset.machine if word.startswith("topology."))
    steps.run(
        "perplexity", "eval", "perplexity", "run", "--length", str(preset.training.seq),
        "--text", held_out, "--samples", str(preset.texts), *both, *device,
    )  # fmt: skip
    _keep(steps, "evaluation/results.jsonl")
    steps.run(
        "needle map", "eval", "niah", "run", "--form", "python", "--needles", str(preset.pairs),
        "--length", ",".join(map(str, preset.lengths)), "--samples", str(preset.samples),
        "--haystack", held_out, *both, *device,
    )  # fmt: skip
    _keep(steps, "evaluation/results.jsonl")
    steps.run("report", "report", "evaluation", "--out", "report", lines=2)
    _keep(steps, "report/report.html")


def _keep(steps: Steps, name: str) -> None:
    """Copy a file of the folder, if it is there, to the results."""
    if (path := steps.folder / name).is_file():
        shutil.copy(path, steps.out / path.name)


def scores(steps: Steps, preset: Preset) -> None:
    """Compare the scores of the trained model with the prediction of rotary embedding."""
    steps.run("export", "checkpoint", "export", "run", "run-hf", lines=1)
    steps.run(
        f"profile sparsity --rope at {preset.scores:,}", "profile", "sparsity", "--rope",
        "--steps", "1", "train.init_from=run-hf", "data=tokens", f"data.path=store/{CODE}",
        "data.document_mask=false", f"seq={preset.scores}", *preset.yarn, *preset.sparsity,
        *preset.machine, lines=30,
    )  # fmt: skip


def read_results(out: Path) -> list[dict[str, Any]]:
    file = out / "results.jsonl"
    rows = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(row) for row in rows]


def tables(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables of loss by context, and of needles by depth and length."""
    found = []
    losses = [each for each in results if each["unit"] == "nats"]
    if losses:
        found += _columns(losses, "earlier tokens", "{begin:,} to {end:,}", "{:.3f}", "loss, nats")
    needles = [each for each in results if each["unit"] == "%"]
    if needles:
        found += _columns(needles, "depth", "{begin}-{end} %", "{:.0f}", "needles found, %")
    return found


def _columns(
    results: Sequence[dict[str, Any]], first: str, label: str, number: str, title: str
) -> list[str]:
    """Return a table with a column per result and a row per part."""
    heads = [f"{_size(each['length'])} {each['attention']}" for each in results]
    parts = [{(p["begin"], p["end"]): p["score"] for p in each["parts"]} for each in results]
    lines = [
        "",
        f"{title}:",
        "",
        f"| {first} | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for begin, end in sorted({span for each in parts for span in each}):
        values = (each.get((begin, end)) for each in parts)
        shown = ["" if value is None else number.format(value) for value in values]
        lines.append(f"| {label.format(begin=begin, end=end)} | {' | '.join(shown)} |")
    whole = ["" if each["score"] is None else number.format(each["score"]) for each in results]
    return [*lines, f"| all | {' | '.join(whole)} |"]


def draw(out: Path) -> str:
    """Draw the figures from results.jsonl; return what was done."""
    try:
        from PIL import Image  # noqa: F401 - to know whether it is there
    except ImportError:
        return "Pillow is not installed: draw later with --draw"
    results = read_results(out)
    needles = [each for each in results if each["unit"] == "%" and each["parts"]]
    losses = [each for each in results if each["unit"] == "nats" and each["parts"]]
    done = []
    if needles:
        draw_map(needles, out / "needles.png")
        done.append("needles.png")
    if losses:
        draw_losses(losses, out / "perplexity.png")
        done.append("perplexity.png")
    return ", ".join(done) or "no results to draw"


_INK, _PAPER, _GREY = (31, 35, 40), (255, 255, 255), (209, 217, 224)
_LINES = ((47, 111, 196), (194, 106, 16), (31, 133, 99), (154, 75, 176))


def draw_map(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a map of depth and length for each attention, side by side."""
    from PIL import Image, ImageDraw, ImageFont

    names = list(dict.fromkeys(each["attention"] for each in results))
    lengths = sorted({each["length"] for each in results})
    cell, high, left, top = 84, 34, 110, 70
    block = max(270, len(lengths) * cell) + 40
    width = left + len(names) * block
    image = Image.new("RGB", (width, top + 10 * high + 50), _PAPER)
    pen = ImageDraw.Draw(image)
    font, bold = ImageFont.load_default(15), ImageFont.load_default(18)
    for row in range(10):
        text = f"{10 * row}-{10 * row + 10} %"
        pen.text((left - 10, top + row * high + high / 2), text, _INK, font, anchor="rm")
    for number, name in enumerate(names):
        x = left + number * block
        pen.text((x, 14), f"{name}: needles found, %", _INK, bold)
        for column, length in enumerate(lengths):
            at = x + column * cell
            pen.text((at + cell / 2, top - 14), _size(length), _INK, font, anchor="mm")
            for each in results:
                if (each["attention"], each["length"]) != (name, length):
                    continue
                for part in each["parts"]:
                    y, score = top + part["begin"] // 10 * high, part["score"] or 0.0
                    box = (at, y, at + cell - 2, y + high - 2)
                    pen.rectangle(box, _shade(score))
                    ink = _PAPER if score > 55 else _INK
                    middle = (at + cell / 2, y + high / 2)
                    pen.text(middle, f"{score:.0f}", ink, font, anchor="mm")
    under = (left, top + 10 * high + 24)
    pen.text(under, "rows: depth of the needle; columns: tokens", _INK, font, anchor="lm")
    image.save(path, optimize=True)


def _shade(score: float) -> tuple[int, int, int]:
    share = min(1.0, max(0.0, score / 100))
    low, high = (238, 241, 244), (31, 133, 99)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


def draw_losses(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss by context, a line for each attention."""
    from PIL import Image, ImageDraw, ImageFont

    ends = sorted({part["end"] for each in results for part in each["parts"]})
    values = [p["score"] for each in results for p in each["parts"] if p["score"] is not None]
    low, high = min(values) - 0.05, max(values) + 0.05
    width, height, left, top = 760, 420, 70, 60
    image = Image.new("RGB", (width, height), _PAPER)
    pen, font, bold = ImageDraw.Draw(image), ImageFont.load_default(15), ImageFont.load_default(18)
    pen.text((left, 14), "Loss by context, nats per token", _INK, bold)

    def place(end: int, score: float) -> tuple[float, float]:
        x = left + 20 + ends.index(end) * (width - left - 60) / max(1, len(ends) - 1)
        return x, top + (high - score) / (high - low) * (height - top - 60)

    for tick in range(5):
        score = low + (high - low) * tick / 4
        y = place(ends[0], score)[1]
        pen.line((left, y, width - 20, y), _GREY)
        pen.text((left - 8, y), f"{score:.2f}", _INK, font, anchor="rm")
    for end in ends[:: 1 + len(ends) // 12]:
        pen.text((place(end, low)[0], height - 40), _size(end), _INK, font, anchor="mm")
    pen.text((width / 2, height - 14), "earlier tokens, up to", _INK, font, anchor="mm")
    for number, each in enumerate(results):
        colour = _LINES[number % len(_LINES)]
        parts = [part for part in each["parts"] if part["score"] is not None]
        points = [place(part["end"], part["score"]) for part in parts]
        pen.line(points, colour, 3 if number == 0 else 2)
        for x, y in points:
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), colour)
        label = f"{_size(each['length'])} {each['attention']}: {each['score']:.4f}"
        pen.text((width - 30, top + 8 + 20 * number), label, colour, font, anchor="rm")
    image.save(path, optimize=True)


def _size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 and tokens else str(tokens)


def about_machine() -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"torch {torch.__version__}, {device}, {os.cpu_count()} CPU cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    sizes = parser.add_mutually_exclusive_group(required=True)
    for name in PRESETS:
        sizes.add_argument(f"--{name}", dest="preset", action="store_const", const=name)
    sizes.add_argument("--draw", action="store_true", help="only draw what OUT holds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder of text and runs; by default OUT.work")
    parser.add_argument("--steps", type=int, help="steps of the last training")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if given.draw:
        print(draw(out))
        return 0
    preset = PRESETS[given.preset]
    if given.steps is not None:
        from dataclasses import replace

        preset = replace(preset, training=replace(preset.training, steps=given.steps))
    (out / "commands.log").unlink(missing_ok=True)
    work = (given.work or out.with_name(f"{out.name}.work")).absolute()
    steps = Steps(work, out, preset.limit_s)
    print(about_machine(), flush=True)
    prepare(steps, preset)
    train(steps, preset)
    texts = generate(steps, preset)
    evaluate(steps, preset)
    scores(steps, preset)
    print(f"figures: {draw(out)}")
    lines = [
        f"`--{given.preset}`: {about_machine()}",
        "",
        "| step | seconds | result |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {seconds:.1f} | {end} |" for name, seconds, end in steps.rows]
    lines += [f"| all | {time.monotonic() - steps.begin:.0f} | |", *tables(read_results(out)), ""]
    print("\n".join(lines))
    (out / "end_to_end.md").write_text("\n".join([*lines, "\n\n".join(texts), ""]))
    return 0 if all(end == "ok" for _, _, end in steps.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
