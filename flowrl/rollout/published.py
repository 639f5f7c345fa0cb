"""`Published`: weights on their way."""

from __future__ import annotations

from typing import Any

from flowrl.core.clock import WEIGHTS
from flowrl.graph.protocols import Workers
from flowrl.rl.policies import Weights


class Published:
    """Weights on their way to the runners."""

    def __init__(self, weights: Weights, version: Any) -> None:
        self.weights = weights
        self.version = version
        self.put: Any = None

    def sent(self, pool: Workers) -> Any:
        """The weights as the workers take them: put once."""
        if self.put is None:
            with WEIGHTS:
                self.put = pool.put((self.weights, self.version))
        return self.put

    def there(self, pool: Workers) -> bool:
        """Whether they can be sent without waiting."""
        return self.put is not None or pool.ready(self.weights)
