"""A setting that is misspelt is told from the one that was meant."""

from __future__ import annotations

import pytest

from distributed_state.errors import ConfigurationError
from distributed_state.settings import Settings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("archiv", r"^archiv: there is no such setting; did you mean archive\?$"),
        ("max_stalenes", r"did you mean max_staleness\?$"),
        ("zzz", r"^zzz: there is no such setting$"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_one_that_is_like_it(given: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        Settings.of(**{given: "redis://:secret@host"})
    assert "secret" not in str(caught.value)
