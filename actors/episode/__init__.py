"""Episodes: what happens between a prompt and its rollout, as one async function over turns of the model."""
