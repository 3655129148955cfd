"""What Rollstream's cost is held against, each as the whole of a process: a plain loop, and TRL's GRPOTrainer.

`python -m ops.bench_loops plain|trl RECIPE.yaml MODEL RESULT.json`, where the result is a `Marks`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from ops.recipe import Recipe


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """The process after each batch: its CPU seconds, the clock, the batch's mean reward and tokens generated for it."""

    cpu_s: list[float] = dataclasses.field(default_factory=list)
    time_s: list[float] = dataclasses.field(default_factory=list)
    reward: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)

    def scored(self, reward: float, tokens: int) -> None:
        """A batch was generated."""
        self.reward.append(reward)
        self.tokens.append(tokens)

    def trained(self) -> None:
        """It was trained on."""
        self.cpu_s.append(time.process_time())
        self.time_s.append(time.time())


def plain(recipe: Recipe, model: Path, folder: Path) -> Marks:
    """The loop of `ops.reference`."""
    from bus.weights import WeightStore
    from ops import reference

    marks = Marks()
    for trained in reference.train(recipe, model, WeightStore(folder / "weights")):
        if trained.metrics:
            marks.scored(trained.metrics["reward_mean"], trained.tokens)
            marks.trained()
    return marks


def trl(recipe: Recipe, model: Path, folder: Path) -> Marks:
    """TRL's GRPOTrainer with the recipe's data, reward, batch, optimizer, learning rate and clip. Reads no network.

    TRL counts optimizer steps where we count batches; loss "dapo" divides by the batch's tokens, as ours does.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    from actors.reward.load import load
    from actors.reward.verifiers import Setting
    from actors.trainer.optimizer import schedule
    from ops.datasets import load_dataset

    library: Any = importlib.import_module("trl")  # optional, and not typed
    datasets: Any = importlib.import_module("datasets")
    trainer, rollout, group = recipe.trainer, recipe.rollout, recipe.controller.group_size
    torch.set_num_threads(trainer.threads)
    data = load_dataset(recipe.data, recipe.base, seed=recipe.seed)
    rows = [data.row(k) for k in range(recipe.controller.batch_groups * recipe.steps)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    function, _ = load(recipe.reward.function, recipe.reward.options, Setting(recipe.base, recipe.reward.timeout_s))
    marks = Marks()

    def reward(completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        ends = ["stop" if ids[-1] == tokenizer.eos_token_id else "length" for ids in completion_ids]
        answers = zip(completions, row, ends, strict=True)
        rewards = [float(function(response=text, task=rows[k], finish=end)) for text, k, end in answers]
        marks.scored(sum(rewards) / len(rewards), sum(map(len, completion_ids)))
        return rewards

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % trainer.minibatches == 0:
                marks.trained()

    config = library.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=recipe.seed,
        shuffle_dataset=False,
        per_device_train_batch_size=recipe.batch_samples // trainer.minibatches,
        steps_per_generation=trainer.minibatches,
        num_iterations=1,
        max_steps=recipe.steps * trainer.minibatches,
        num_generations=group,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=0,
        top_p=1.0,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=trainer.clip,
        max_grad_norm=trainer.grad_clip,
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        policy.parameters(), trainer.lr, trainer.betas, weight_decay=trainer.weight_decay, fused=True
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step // trainer.minibatches, trainer))
    grpo = library.GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["prompt"], "row": k} for k, row in enumerate(rows)]),
        processing_class=tokenizer,
        callbacks=[Watch()],
        optimizers=(optimizer, rate),
    )
    grpo.remove_callback(PrinterCallback)
    grpo.train()
    return marks


def main(arguments: list[str]) -> None:
    """Train as told, and leave the marks."""
    name, recipe, model, result = arguments
    loop = {"plain": plain, "trl": trl}[name]
    marks = loop(Recipe.from_yaml(Path(recipe).read_text()), Path(model), Path(result).parent)
    Path(result).write_text(json.dumps(dataclasses.asdict(marks)))


if __name__ == "__main__":
    main(sys.argv[1:])
