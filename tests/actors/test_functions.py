"""Loading a function that a recipe names."""

import sys
from pathlib import Path

import pytest

from actors.functions import FunctionNotFound, load_function


def test_a_file_is_found_relative_to_the_recipe_and_may_import_its_neighbours(tmp_path: Path) -> None:
    """A recipe and its functions are copied and moved together."""
    (tmp_path / "neighbour_of_mine.py").write_text("LIMIT = 3")
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import LIMIT\ndef limit(): return LIMIT")
    assert load_function("mine.py:limit", tmp_path)() == 3


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    """Many projects have a rewards.py."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rewards.py").write_text(f"def who(): return {name!r}")
    assert [load_function(f"{name}/rewards.py:who", tmp_path)() for name in ("a", "b")] == ["a", "b"]


def test_a_module_is_found_in_the_recipes_folder_but_shadows_nothing(tmp_path: Path) -> None:
    """The recipe's folder is searched last: a file called json.py there must not replace the library."""
    (tmp_path / "json.py").write_text("def dumps(value): return 'mine'")
    (tmp_path / "only_in_this_folder.py").write_text("def here(): return True")
    assert load_function("only_in_this_folder:here", tmp_path)()
    assert load_function("json:dumps", tmp_path)(1) == "1"


def test_a_function_is_loaded_once(tmp_path: Path) -> None:
    """Loading again must not run a heavy import twice, nor give another function."""
    (tmp_path / "heavy.py").write_text("def it(): pass")
    assert load_function("heavy.py:it", tmp_path) is load_function("heavy.py:it", tmp_path)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nothing", "'nothing' names no function. Write 'package.module:function' or 'path/to/file.py:function'."),
        (":f", "names no function"),
        ("os.pathh:join", "there is no module os.pathh"),
        ("posixpath:joyn", "has no function joyn. Did you mean join?"),
        ("syntax.py:f", r"syntax.py, line 2 failed with SyntaxError"),
        ("raises.py:f", r"raises.py, line 1 failed with ZeroDivisionError: division by zero. Mend the file"),
        ("needs:f", r"importing needs failed with ModuleNotFoundError: No module named 'no_such_thing'"),
        ("empty.py:f", "has no function f. Define it there, or correct the name."),
    ],
)
def test_the_error_names_what_was_looked_for_and_what_to_do(tmp_path: Path, spec: str, says: str) -> None:
    """This is the first error that a new user meets."""
    (tmp_path / "syntax.py").write_text("\ndef f(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "needs.py").write_text("import no_such_thing\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(FunctionNotFound, match=says):
        load_function(spec, tmp_path)
    assert "needs" not in sys.modules
