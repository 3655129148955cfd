"""`code`: the program in the reply passes the tests of its data row, in the sandbox.

A row's `tests` is a list of

    {"stdin": "2 3\\n", "stdout": "5\\n"}                        a program's input and output
    {"function": "add", "args": [2, 3], "expected": 5}         a call, of a function or of a method of class Solution

each with a `weight`, 1 if it has none. Inputs enter the sandbox; what is expected never does.
"""

import json
import keyword
import math
import time
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from actors.reward import TESTS_MAX
from actors.reward.compare import output_bytes, same_output, same_value, value_bytes
from actors.reward.program import Where, find_program
from actors.reward.sandbox import Box, Call, Limits, Sandbox
from actors.reward.verifiers import Setting
from actors.reward.verifiers.extract import behind
from schemas.errors import UserError

SHARE_OF_TIMEOUT = 0.8  # of reward.timeout_s, which ends the process: the rest is for starting sandboxes
WEIGHT_MAX = 1e9  # of one test: the sum of them all must be a number
BOUNDS = {"test_time_s": (0.1, 3600.0), "memory_mb": (1, 1 << 20), "processes": (1, 4096), "output_kb": (1, 1 << 20)}
"""Of options. In less than a tenth of a second not even a program of nothing ends for certain."""
FAILURES = ("wrong", "failed", "compile_error", "timeout", "memory", "output", "forbidden", "no_program")
"""Parts of the verdict: how many tests ended so. `no_program` is 1 if the reply held none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a program is found, run and scored."""

    extract: Where = "fenced"
    """`fenced`: the last fenced block, of Python if there is one. `whole`: the reply is the program."""
    after: str | None = None
    """Only what stands behind the last such mark counts, such as `</think>`; a reply without it holds no program."""
    score: Literal["all", "fraction", "weighted"] = "all"
    """`all`: 1 if every test passes, and the first that fails ends it. `fraction`: the part that passes. `weighted`:
    the weight of those that pass, of the weight of all."""
    tests_key: str = "tests"
    """Which entry of the row holds the tests."""
    test_time_s: float = 4.0
    """Seconds that the program may take for one test, from its own start."""
    total_time_s: float | None = None
    """Seconds for all tests together, starting the sandbox left out; by default 0.8 of `reward.timeout_s`."""
    memory_mb: int = 512
    """Of each process, and of all processes together."""
    processes: int = 40
    output_kb: int = 1024
    tolerance: float = 1e-6
    """By how much a number with a fraction may differ, relative or absolute; 0 for not at all."""

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)} => It must be from {least} to {most}")
        if self.total_time_s is not None and not 0 < self.total_time_s < math.inf:
            raise ValueError(f"total_time_s is {self.total_time_s} => It must be more than 0")
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance is {self.tolerance} => It must be 0 or more")

    def limits(self) -> Limits:
        """Of one test."""
        return Limits(
            time_s=self.test_time_s,
            memory_bytes=self.memory_mb << 20,
            processes=self.processes,
            output_bytes=self.output_kb << 10,
        )


@dataclass(frozen=True, slots=True)
class Test:
    """One test of a row: what enters the sandbox, and what must come out of it."""

    stdin: str
    call: Call | None
    expected: Any
    """The whole stdout, as text, or the value that the call returns."""
    weight: float


class CodeReward:
    """The reward function, with a sandbox of its own. It is closed with its process, or by `close`."""

    def __init__(self, options: Options, total_s: float, timeout_s: float) -> None:
        self._options = options
        self._total_s = total_s
        self._timeout_s = timeout_s
        self._sandbox = Sandbox(options.limits(), children=1)
        self._sandbox.start()

    def __call__(self, response: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """The score of the program in the reply, how many tests it passed, and of what the others failed.

        Raises `ValueError` for a row without tests, and `SandboxLost` if the sandbox fails.
        """
        until = time.monotonic() + self._timeout_s
        options = self._options
        tests = read_tests(task.get(options.tests_key), options.tests_key, options.output_kb << 10)
        said = behind(response, options.after)
        program = None if said is None else find_program(said, options.extract)
        if program is None:
            return _scored(0.0, 0, len(tests), Counter(no_program=1))
        with self._sandbox.borrow() as box:
            return grade(box, program, tests, options, self._total_s, until)

    def close(self) -> None:
        """End the sandbox."""
        self._sandbox.close()


def load(options: Options, setting: Setting) -> CodeReward:
    """The `code` function. Raises `UserError` where code cannot be isolated."""
    total = setting.timeout_s * SHARE_OF_TIMEOUT
    if options.total_time_s is not None:
        if options.total_time_s > total:
            raise UserError(
                f"reward.options.total_time_s = {options.total_time_s:g} s is more than 0.8 times reward.timeout_s = "
                f"{setting.timeout_s:g} s, after which the reward process is killed.",
                f"Raise reward.timeout_s to {math.ceil(options.total_time_s / SHARE_OF_TIMEOUT)} or more.",
            )
        total = options.total_time_s
    return CodeReward(options, total, setting.timeout_s)


def grade(
    box: Box, program: str, tests: Sequence[Test], options: Options, total_s: float, until: float = math.inf
) -> dict[str, Any]:
    """Run the tests one after another, for `total_s` together. A run that ended from outside does not count into that.

    Raises `SandboxLost` if that happens again and again, or one more run might end after `until`, a reading of
    `time.monotonic`: it says nothing of the program.
    """
    limits = options.limits()
    left, passed, earned = total_s, 0, 0.0
    failures: Counter[str] = Counter()
    for number, test in enumerate(tests):
        if left <= 0:
            failures["timeout"] += len(tests) - number
            break
        time_s = min(limits.time_s, left)
        result = box.run(program, test.stdin, call=test.call, limits=replace(limits, time_s=time_s), until=until)
        left -= result.seconds
        if result.status == "compile_error":  # of all tests alike
            failures["compile_error"] = len(tests) - number
            break
        if result.status == "ok" and _passes(test, result.stdout, result.value, options.tolerance):
            passed += 1
            earned += test.weight
        else:
            failures["wrong" if result.status == "ok" else result.status] += 1
            if options.score == "all":
                break
    reward = {
        "all": float(passed == len(tests)),
        "fraction": passed / len(tests),
        "weighted": min(1.0, earned / sum(test.weight for test in tests)),
    }[options.score]
    return _scored(reward, passed, len(tests), failures)


def _passes(test: Test, stdout: str, value: str | None, tolerance: float) -> bool:
    if test.call is None:
        return same_output(stdout, test.expected, tolerance)
    return same_value(value, test.expected, tolerance)


def _scored(reward: float, passed: int, tests: int, failures: Counter[str]) -> dict[str, Any]:
    reasons = "".join(f", {name}" for name in FAILURES if failures[name])
    parts = {name: float(failures[name]) for name in FAILURES}
    return {"reward": reward, "passed": passed, "tests": tests, **parts, "detail": f"passed {passed}/{tests}{reasons}"}


def read_tests(given: Any, key: str, bytes_max: int) -> list[Test]:
    """A row's tests. Raises `ValueError`, in words for the verdict's detail, if they are none: the data's fault.

    So is a test that no program passes, such as one that expects NaN, or more than the `bytes_max` of one's output.
    """
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"the data row has no list of tests '{key}'")
    if len(given) > TESTS_MAX:
        raise ValueError(f"the data row has {len(given)} tests, more than {TESTS_MAX}")
    tests = [_read_test(f"{key}[{number}]", test) for number, test in enumerate(given)]
    for number, test in enumerate(tests):
        try:
            least = output_bytes(test.expected) if test.call is None else value_bytes(test.expected) + len("V")
        except ValueError as error:
            raise ValueError(f"what {key}[{number}] expects {error}") from None
        if least > bytes_max:
            raise ValueError(f"what {key}[{number}] expects has {least} bytes, more than output_kb allows")
    return tests


def _read_test(name: str, test: Any) -> Test:
    if not isinstance(test, Mapping):
        raise ValueError(f"{name} is {type(test).__name__}, not a map")
    weight = test.get("weight", 1.0)
    if type(weight) not in (int, float) or not 0 < weight <= WEIGHT_MAX:
        raise ValueError(f"the weight of {name} is not a number above 0, at most {WEIGHT_MAX:g}")
    if "function" in test:
        function, arguments = test["function"], test.get("args", [])
        if not _is_name(function) or not isinstance(arguments, list | tuple):
            raise ValueError(f"{name} is not a function's name with a list 'args'")
        if "expected" not in test:
            raise ValueError(f"{name} has no 'expected'")
        try:
            name_in_python = unicodedata.normalize("NFKC", function)
            return Test("", Call(name_in_python, json.dumps(arguments)), test["expected"], weight)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} has arguments that are no JSON: {error}") from None
    stdin, stdout = test.get("stdin", ""), test.get("stdout")
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise ValueError(f"{name} needs 'stdin' and 'stdout', both text, or 'function', 'args' and 'expected'")
    return Test(stdin, None, stdout, weight)


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and given.isidentifier() and not keyword.iskeyword(given)
