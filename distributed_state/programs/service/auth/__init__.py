"""Who may what: how callers of the service are known, and the policy that holds them to it."""

from distributed_state.programs.service.auth.authentication import Access, Authentication
from distributed_state.programs.service.auth.hosts import KnownHosts
from distributed_state.programs.service.auth.jwts import Issuer
from distributed_state.programs.service.auth.policy import callers_policy

__all__ = ["Access", "Authentication", "Issuer", "KnownHosts", "callers_policy"]
