"""The page on compilers is what the backends say."""

from benchmarks import habits


def test_the_page_is_current():
    assert habits.PAGE.read_text("utf-8") == habits.page()


def test_every_habit_is_on_the_page():
    page = habits.page()
    assert all(f"`{name}`" in page for name in habits.meanings(habits.backend.Fusion))
    assert "`threefry_operations`, CUDA: 79 instructions" in page
