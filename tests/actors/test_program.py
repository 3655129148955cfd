"""Which part of a reply is run: the wrong block scores a right answer 0."""

import pytest

from actors.reward.program import find_program


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```python\nx\n```", "x"),
        ("```\nx\n```", "x"),
        ("first\n```python\na\n```\nthen\n```python\nb\n```\nend", "b"),
        ("```python\na\n```\nits output:\n```\n5\n```", "a"),
        ("```text\na\n```\n```json\nb\n```", "b"),
        ("```PY\na\n```", "a"),
        ("```python3 title=x\na\nb\n```", "a\nb"),
        ("~~~python\na\n~~~", "a"),
        ("````python\n```\na\n```\n````", "```\na\n```"),
        ("  ```python\na\n  ```", "a"),
        ("1. so:\n\n   ```python\n   if x:\n       a\n\n   b\n   ```", "if x:\n    a\n\nb"),
        ("- so:\n    - then\n\n        ```python\n        a\n          b\n    c\n        ```\nend", "a\n  b\nc"),
        (
            '```python\ndef f():\n    """\n    ```\n    x\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    x\n    ```\n    """',
        ),
        ("```python\r\na\r\n```\r\n", "a\r"),
        ("```python\n\n```", ""),
        ("```python\nprint('```')\n```", "print('```')"),
    ],
)
def test_the_last_block_of_python_is_the_program(reply: str, program: str) -> None:
    assert find_program(reply) == program


@pytest.mark.parametrize("reply", ["", "print(1)", "```python\nx", "`x`", "```python\nx\n~~~"])
def test_without_a_closed_block_there_is_no_program(reply: str) -> None:
    """A reply that was cut at its limit must not pass by half a program."""
    assert find_program(reply) is None


def test_the_whole_reply_can_be_the_program() -> None:
    assert find_program("print(1)", "whole") == "print(1)"


def test_a_reply_of_fences_alone_is_read_in_one_pass() -> None:
    assert find_program("```\n" * 200_001) == ""
