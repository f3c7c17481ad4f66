"""A model of this project for EleutherAI's `lm-eval`, run by the engine in this process or by a server.

    from lm_eval import simple_evaluate
    from shardwise.evaluate.lm_eval import ShardwiseLM
    simple_evaluate(ShardwiseLM.of_checkpoint("runs/mine"), tasks=["hellaswag"])

Importing this file also registers the model, as `--model shardwise`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.format import RUN_FILE
from shardwise.data.chat.template import ChatTemplate, load_template
from shardwise.data.tokenizer import load_tokenizer
from shardwise.evaluate.answering import Answerer, HttpAnswerer, Wanted, engine_answerer
from shardwise.run import read_run

MAX_TOKENS = 256
"""lm-eval's default, for tasks that set no limit."""


@register_model("shardwise")
class ShardwiseLM(LM):
    """Answers lm-eval's three kinds of requests."""

    def __init__(
        self,
        checkpoint: str = "",
        url: str = "",
        longest: int | str = 0,
        answerer: Answerer | None = None,
        template: ChatTemplate | None = None,
        api_key: str = "",
        **_: Any,
    ) -> None:
        """`checkpoint`: a checkpoint or run folder. With a `url` only its tokenizer is read, and the server at that address
        answers, to an `api_key` if it wants one. lm-eval's own options (`batch_size`, `device`) are ignored: the engine decides
        those."""
        super().__init__()
        if answerer is None:
            folder = checkpoint_folder(Path(checkpoint))
            run = read_run(folder / RUN_FILE)
            tokenizer, longest = load_tokenizer(folder), int(longest) or run.model.max_positions
            template = load_template(folder, tokenizer)
            answerer = HttpAnswerer(url, tokenizer, longest, api_key) if url else engine_answerer(folder, run, longest)
        self.answerer, self.template = answerer, template

    @classmethod
    def of_checkpoint(cls, checkpoint: str | Path, longest: int = 0) -> ShardwiseLM:
        """A model run by an engine in this process."""
        return cls(str(checkpoint), longest=longest)

    @classmethod
    def of_server(cls, url: str, checkpoint: str | Path, longest: int = 0, api_key: str = "") -> ShardwiseLM:
        """A model run by a server; `checkpoint` is the one it serves, for its tokenizer."""
        return cls(str(checkpoint), url, longest, api_key=api_key)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        pairs = [self.answerer.encode_pair(*request.args) for request in requests]
        return [(each.logprob, each.greedy) for each in self.answerer.likelihoods(pairs)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        windows, numbers = [], []
        for number, request in enumerate(requests):
            tokens = self.answerer.tokenizer.encode(request.args[0])
            # A window's first token is its context.
            cut = get_rolling_token_windows(tokens, self.answerer.first, self.answerer.longest - 1, 1)
            for window in map(make_disjoint_window, cut):
                windows.append(window)
                numbers.append(number)
        sums = [0.0] * len(requests)
        for number, each in zip(numbers, self.answerer.likelihoods(windows), strict=True):
            sums[number] += each.logprob
        return sums

    def generate_until(self, requests: list[Any]) -> list[str]:
        wanted = []
        for request in requests:
            context, options = request.args
            stop = options.get("until") or []
            stop = [stop] if isinstance(stop, str) else stop
            temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
            most = int(options.get("max_gen_toks") or MAX_TOKENS)
            most = min(most, self.answerer.longest - 1)
            wanted.append(Wanted(self.answerer.encode(context), most, tuple(filter(None, stop)), temperature))
        return self.answerer.generate(wanted)

    @property
    def tokenizer_name(self) -> str:
        return self.answerer.tokenizer.digest

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.template.source if chat_template and self.template is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        assert self.template is not None
        return self.template.render(chat_history, prompt=add_generation_prompt)
