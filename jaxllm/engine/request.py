"""One request on its way through the engine."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from jaxllm.cache.prefix import ROOT
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured.matcher import Matcher


class RequestStatus(Enum):
    """Where a request is: in the queue (new or preempted), holding blocks, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Key(NamedTuple):
    """What the engine knows a request by whose owner has a name space of his own; equal to no text.

    Attributes:
        owner: who made it, compared by identity.
        request_id: unique among the owner's unfinished requests.
        place: among the outputs of its prompt.
    """

    owner: object
    request_id: str
    place: int


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, what was generated from it, and where its KV lies.

    `token_ids` are all known tokens, prompt and output. KV has been computed for the first `num_computed_tokens` of
    them; position p lives in slot `block_table[p // block_size] * block_size + p % block_size`. Steps that are under
    way compute it up to `num_scheduled_tokens`, and `num_pending_tokens` tokens that they sample are not known yet.
    Preemption gives the blocks back and sets all three to 0, the known tokens stay. Only the scheduler changes these
    fields.

    Raises ValueError when the prompt is empty.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    """Seconds on the engine's clock."""
    index: int = 0
    """Place in the order in which requests were made."""
    seed: int = 0
    """Signed 64-bit seed of its draws."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences of `params.bad_words`."""
    processors: int = 0
    """Bit i set: `params.logits_processors` names the engine's logits processor i."""
    matcher: Matcher | None = None
    """Where it stands in its grammar, if it has one."""
    key: Hashable = None
    """What the engine knows it by, unique among unfinished requests; `request_id` where nothing is given."""

    arrival: int = field(init=False, default=0)
    """Place in the scheduler's order of arrival."""
    token_ids: list[int] = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    num_scheduled_tokens: int = field(init=False, default=0)
    num_pending_tokens: int = field(init=False, default=0)
    max_tokens: int = field(init=False, default=0)
    """Most tokens, prompt and output; set by the scheduler."""
    seat: int | None = field(init=False, default=None)
    """Index of its place in the state on the devices, over all replicas, while it runs."""
    block_table: list[int] = field(init=False, default_factory=list, repr=False)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    finish_reason: str | None = field(init=False, default=None)
    """Once finished: "stop", "length" or "abort"."""
    stop_reason: int | str | None = field(init=False, default=None)
    """The stop token id or stop string that ended it; None for eos and for every other reason."""
    num_preemptions: int = field(init=False, default=0)
    num_cached_tokens: int | None = field(init=False, default=None)
    """Prompt tokens whose KV was found in the prefix cache at the first admission; None before it."""
    num_registered_blocks: int = field(init=False, default=0)
    """Leading blocks of the table whose content the prefix cache knows."""
    num_prompt_logprobs: int = field(init=False, default=0)
    """Leading positions of the prompt whose next token's log probability is known."""
    content_id: int = field(init=False, default=ROOT)
    """The prefix cache's content id of the last of them."""

    def __post_init__(self) -> None:
        self.key = self.request_id if self.key is None else self.key
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if not self.token_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt; give at least 1 token")

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def check_stop(self) -> str | None:
        """The finish reason that the last known token brings, None when generation goes on.

        Before `min_tokens` only the length limits end a request. A token that ends it both ways counts as "stop".
        Sets `stop_reason` when the token is one of `stop_token_ids`. Stop strings are checked where there is text.
        """
        params = self.params
        num_tokens = len(self.token_ids)
        if num_tokens - self.num_prompt_tokens >= params.min_tokens:
            token = self.token_ids[-1]
            if not params.ignore_eos and token in self.eos_token_ids:
                return "stop"
            if token in params.stop_token_ids:
                self.stop_reason = token
                return "stop"
        return "length" if num_tokens >= self.max_tokens else None

    def wants_prompt_logprobs(self, start: int) -> bool:
        """Whether the log probability of the token behind position `start` is asked for."""
        return self.params.prompt_logprobs is not None and start + 1 < self.num_prompt_tokens

    def ending_ids(self) -> frozenset[int]:
        """Tokens that end the request."""
        stops = frozenset(self.params.stop_token_ids)
        return stops if self.params.ignore_eos else stops | self.eos_token_ids
