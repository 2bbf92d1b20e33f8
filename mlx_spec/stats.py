"""What happened: counters of one generation, and why it was not speculative if it was not."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_spec.depth import State
from mlx_spec.options import DraftTokens
from mlx_spec.sampling import Law

Reason = Literal[
    "no-drafter",  # none was given or found
    "num-draft-tokens-0",  # switched off by the caller
    "unsupported-model",  # one that is spread over several machines
    "unsupported-cache",  # a cache class that cannot be rolled back
    "input-embeddings",  # the prompt is not (only) tokens
    "batch",  # several requests at once: mlx-lm decodes them in a batch
    "parked",  # drafting did not pay when it was last tried
    "no-match",  # lookup found nothing in the text to go on with
    "too-short",  # generation ended before a draft could be made
]


@dataclass
class SpecStats:
    """Counters of one generation.

    A round is one forward of the target. `drafted` and `accepted` count tokens;
    `accepted_by_position[i]` counts how often draft i+1 was accepted, `drafted_by_position[i]`
    how often it was offered. `accepted_yielded` leaves out what was accepted after the end of the
    text. `unprimed` counts tokens that the drafter has not seen, `batched` those that were decoded
    in a batch, without drafts. `reason` is set where speculation was not engaged. `sampling` is the
    law by which tokens were drawn (accept.py); `depth` is how many drafts the newest round was to
    have, `state` and `state_reason` say why (depth.py). `by_kind` has drafted and accepted tokens
    of each kind of drafter.
    """

    kind: str | None = None
    num_draft_tokens: DraftTokens = 0
    sampling: Law | None = None
    depth: int = 0
    state: State | None = None
    state_reason: str | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_yielded: int = 0
    unprimed: int = 0
    batched: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    by_kind: dict[str, tuple[int, int]] = field(default_factory=dict)
    reason: Reason | None = None
    detail: str | None = None

    @property
    def engaged(self) -> bool:
        return self.drafted > 0

    @property
    def acceptance(self) -> float | None:
        """accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """1 + accepted / rounds; None before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def why(self) -> str:
        """The reason for not being engaged, with its detail."""
        return f"{self.reason} ({self.detail})" if self.detail else str(self.reason)

    def conclude(self) -> None:
        """The generation has ended: if nothing was drafted, there is a reason."""
        if self.engaged or self.reason is not None:
            return
        if self.batched:
            self.reason = "batch"
        elif self.state == "parked":
            self.reason, self.detail = "parked", self.state_reason
        elif self.kind == "lookup" and self.rounds > 1:
            self.reason = "no-match"
        else:
            self.reason = "too-short"

    def add_round(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        longest = max(drafted, len(self.drafted_by_position))
        for counts, count in [
            (self.drafted_by_position, drafted),
            (self.accepted_by_position, accepted),
        ]:
            counts.extend([0] * (longest - len(counts)))
            for position in range(count):
                counts[position] += 1

    def add_drafts(self, kind: str, drafted: int, accepted: int) -> None:
        before = self.by_kind.get(kind, (0, 0))
        self.by_kind[kind] = (before[0] + drafted, before[1] + accepted)

    def copy(self) -> "SpecStats":
        return replace(
            self,
            drafted_by_position=list(self.drafted_by_position),
            accepted_by_position=list(self.accepted_by_position),
            by_kind=dict(self.by_kind),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON. `engaged` false comes with a `reason`; `acceptance` null means that
        nothing was drafted, 0 that nothing was accepted."""
        return {
            "engaged": self.engaged,
            "reason": self.reason,
            "detail": self.detail,
            "draft_kind": self.kind,
            "num_draft_tokens": self.num_draft_tokens,
            "sampling": self.sampling,
            "depth": self.depth,
            "state": self.state,
            "state_reason": self.state_reason,
            "rounds": self.rounds,
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
            "unprimed": self.unprimed,
            "batched": self.batched,
            "acceptance": self.acceptance,
            "tokens_per_round": self.tokens_per_round,
            "drafted_by_position": self.drafted_by_position,
            "accepted_by_position": self.accepted_by_position,
            "by_kind": {
                kind: {"draft_n": drafted, "draft_n_accepted": accepted}
                for kind, (drafted, accepted) in self.by_kind.items()
            },
        }

    def as_text(self) -> str:
        """Two or three lines for people."""
        if not self.engaged:
            return f"Speculation: not engaged: {self.why}"
        positions = " ".join(
            f"{accepted / drafted:.2f}"
            for accepted, drafted in zip(
                self.accepted_by_position, self.drafted_by_position, strict=True
            )
            if drafted
        )
        return (
            f"Speculation: {self.kind}, {self.depth_text()}, {self.sampling} sampling; "
            f"{self.accepted} of {self.drafted} drafts accepted ({self.acceptance:.2f})\n"
            f"Accepted by position (share of all offered there): {positions}; "
            f"{self.tokens_per_round:.2f} tokens a round in {self.rounds} rounds"
            + self._by_kind_text()
            + (f"\n{self.unprimed_text()}" if self.unprimed else "")
        )

    def _by_kind_text(self) -> str:
        if len(self.by_kind) < 2:
            return ""
        return "\nOf these " + ", ".join(
            f"{kind}: {accepted} of {drafted} accepted"
            for kind, (drafted, accepted) in self.by_kind.items()
        )

    def depth_text(self) -> str:
        if self.num_draft_tokens != "auto":
            return f"{self.num_draft_tokens} drafts a round"
        now = (
            f"parked: {self.state_reason}" if self.state == "parked" else f"{self.depth} at the end"
        )
        return f"auto depth ({now})"

    def unprimed_text(self) -> str:
        return (
            f"The drafter has not seen {self.unprimed} tokens, of a prompt cache or of a batch, "
            "so it may be right less often."
        )
