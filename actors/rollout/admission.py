"""Whether a request needs decoding at all, and whether it can be decoded: the same for every engine."""

from dataclasses import replace

from actors.rollout.engine import ContextTooLongError, Generation, InvalidRequestError, Request


def settled(request: Request, vocab_size: int, max_context: int) -> Generation | None:
    """The result, if the prefix already is one; None if there is something to decode. Pure.

    Raises `ContextTooLongError` if prompt and prefix leave no room for a token, `InvalidRequestError` for an empty
    prompt, tokens outside the model's vocabulary, or a prefix of another prompt.
    """
    prefix, sampling = request.unfinished(), request.sampling
    known = request.prompt_tokens + prefix.tokens
    if not request.prompt_tokens:
        raise InvalidRequestError(f"sample {request.sample_id}: the prompt is empty; a model needs one token at least")
    if prefix.prompt_tokens != request.prompt_tokens:
        raise InvalidRequestError(f"sample {request.sample_id}: the prefix continues another prompt")
    if not 0 <= min(known) <= max(known) < vocab_size:
        raise InvalidRequestError(
            f"sample {request.sample_id}: token ids must lie in 0..{vocab_size - 1}, "
            f"not {min(known)}..{max(known)}: does the tokenizer belong to this model?"
        )
    if prefix.tokens and prefix.tokens[-1] in sampling.stop_token_ids:
        return replace(prefix, finish="stop")
    if len(prefix.tokens) >= sampling.max_new_tokens:
        return replace(prefix, finish="length")
    if len(known) >= max_context:
        if prefix.tokens:
            return replace(prefix, finish="length")
        raise ContextTooLongError(
            f"sample {request.sample_id}: a prompt of {len(known)} tokens leaves no room in a context of "
            f"{max_context}; drop prompts of that length, or use a model with a longer context"
        )
    return None
