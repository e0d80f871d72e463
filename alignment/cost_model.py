"""What a batch of train_rl will take, from shapes and the hardware's rates alone: seconds by part, rollout share."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RlPrediction:
    """Seconds of one batch by part."""

    rollout_s: float
    log_prob_s: float
    update_s: float
    sync_s: float
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def step_time_s(self) -> float:
        return self.rollout_s + self.log_prob_s + self.update_s + self.sync_s

    def fields(self) -> dict[str, Any]:
        names = ("rollout_s", "log_prob_s", "update_s", "sync_s", "step_time_s")
        return {name: getattr(self, name) for name in names} | {
            "rollout_share": self.rollout_s / self.step_time_s,
            "notes": self.notes,
        }


def predict_batch(config, model, hardware) -> RlPrediction | None:
    return None
