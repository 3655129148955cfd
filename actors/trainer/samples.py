"""What a trainer is fed. No torch here."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sample of a batch, as the learner takes it; P prompt tokens, T response tokens.

    Raises ValueError if the response arrays differ in length, if the prompt or the response is empty, or if the reward
    is not finite.
    """

    sample_id: str
    group_id: int
    prompt_tokens: npt.NDArray[np.int32]  # [P]
    tokens: npt.NDArray[np.int32]  # [T]
    behaviour_logprobs: npt.NDArray[np.float32]  # [T], at the rollout's temperature
    loss_mask: npt.NDArray[np.bool_]  # [T], False = not trained: too old, a tool's token, ...
    reward: float

    def __post_init__(self) -> None:
        T = len(self.tokens)
        if len(self.behaviour_logprobs) != T or len(self.loss_mask) != T:
            raise ValueError(
                f"sample {self.sample_id}: {T} tokens, {len(self.behaviour_logprobs)} behaviour_logprobs and "
                f"{len(self.loss_mask)} loss_mask entries; all three must be of one length"
            )
        if T == 0 or len(self.prompt_tokens) == 0:
            raise ValueError(f"sample {self.sample_id}: prompt and response must hold at least one token each")
        if not np.isfinite(self.reward):
            raise ValueError(f"sample {self.sample_id}: reward {self.reward} is not finite; drop it before training")
