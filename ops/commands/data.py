"""The command of `cli` that looks at a recipe's data. As there, it imports what it needs."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.commands.options import AsJson, Overrides, RecipePath


def data(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Draws whose tokens are counted.")] = 1000,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Rows to show in full.")] = 3,
    held_out: Annotated[bool, typer.Option("--eval/--no-eval", help="Look at data.eval, too.")] = True,
    tokens: Annotated[
        bool, typer.Option("--tokens/--no-tokens", help="With the model's tokenizer: lengths, and its chat template.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Look at a recipe's data before training: rows, bad ones, lengths, and examples as the model sees them.

    Exit status 1 if a run would stop because of the data.

    ```
    rollstream data my.yaml
    rollstream data my.yaml data.train=data/other.jsonl data.format=gsm8k
    rollstream data recipes/running_total.yaml --count 200 --examples 1
    ```
    """
    from ops.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    from ops import look as command
    from ops.logging import configure

    configure(console=False)
    raise typer.Exit(command.main(resolved, held_out, count, examples, tokens, as_json))
