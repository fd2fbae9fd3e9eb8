"""What proposals are made of: pure parts of `propose.py`."""

from types import SimpleNamespace

from jdelta._src.search.propose import by_worth
from tests.candidates import RECOMPUTE, SAVE


def test_the_next_value_to_be_saved_is_the_one_that_saves_most():
    def residual(name, seconds, holding=0.0, *, needed=True):
        return SimpleNamespace(name=name, seconds=seconds, holding=holding, needed=needed)

    residuals = [
        residual("sin", 1.0),
        residual("tanh", 3.0, 1.5),
        residual("exp", 2.0, 2.0),  # as long to hold as to compute
        residual("saved", 9.0),
        residual("pinned", 9.0),
        residual("unread", 9.0, needed=False),
    ]
    decisions = {r.name: SAVE if r.name == "saved" else RECOMPUTE for r in residuals}
    items = SimpleNamespace(residuals=residuals, pinned={"pinned": RECOMPUTE})
    assert [r.name for r in by_worth(items, decisions)] == ["tanh", "sin"]
