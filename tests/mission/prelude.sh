# The helpers of the commands in mission_rows.py.
set -euo pipefail
# Three exact steps.
one="train.steps=3 train.dtype=float32 seq=512 seed=3 train.checkpoint_every=0"

# equal A B [KEY [LIMIT]]: the runs have equally many steps, whose losses differ by less than 2e-5.
equal() { python - "$1" "$2" "${3:-loss}" "${4:-2e-5}" <<'END'
import json, pathlib, sys

first, second, key, limit = sys.argv[1:]
read = lambda run: [
    row[key]
    for row in map(json.loads, pathlib.Path("runs", run, "metrics.jsonl").open())
    if row.get(key) is not None
]
a, b = read(first), read(second)
assert a and len(a) == len(b), f"{first} has {len(a)} steps, {second} has {len(b)}"
worst = max(abs(x - y) for x, y in zip(a, b))
print(f"{len(a)} steps, largest difference of {key} {worst:.1e}")
assert worst < float(limit), f"{first} and {second} differ by more than {limit}"
END
}

# degrees: the imbalance of work in the newest profile, which has no noise, for every case.
degrees() { python - <<'END'
import json, pathlib

newest = max(pathlib.Path("measurements").glob("*/summary.json"), key=lambda p: p.stat().st_mtime)
summary = json.loads(newest.read_text())
for case, result in zip(summary["cases"], summary["results"]):
    worker, step = (result["work"][name]["mean"] for name in ("worker", "step"))
    steps = case["steps"]["forward"]
    print(f"{case['label']}: work {worker:.2f} of workers, {step:.2f} of steps, {steps} steps")
END
}

# checks FILE... [OPTION...]: run tests of the checkout in the environment of the checkout.
checks() {
    (cd "$CHECKOUT/tests" && "$CHECKOUT_PYTHON" -m pytest -n 0 -v -p no:cacheprovider "$@")
}
