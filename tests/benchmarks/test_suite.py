"""The suite's commands can be given, and it ends with a short table."""

import pytest

from benchmarks import scaling, suite, throughput
from benchmarks.ways import choose_ways


@pytest.mark.parametrize("form", sorted(suite.FORMS))
def test_every_command_of_the_suite_can_be_given(form, tiny_model):
    modules = {"throughput": throughput, "scaling": scaling}
    for question, *arguments in suite.FORMS[form]:
        options = modules[question].parse_options(arguments)
        if question == "throughput":
            names = [way.name for way in choose_ways(options, tiny_model).ways]
            assert set(options.variants) <= set(names)


def test_the_suite_ends_with_a_short_table(throughput_run, scaling_run):
    results = [throughput_run[0], scaling_run[0]]
    head, line, losses, growth = suite.summary(results).splitlines()
    assert "other way" in head
    found = results[0]["corpora"]["short"]
    others = {name: ratio["ratio_of_medians"] for name, ratio in found["speed_up"].items()}
    fastest = min(others, key=others.get)
    assert line.split()[:4] == ["bert", "short,", "12", "documents"]
    assert line.endswith(f"{others['pipeline held']:.2f}x{others[fastest]:8.2f}x {fastest}")
    loss = results[1]["partitions"]["variants"]["gpuclassify"]["time_ratio"] - 1
    assert losses.endswith(f"gpuclassify {loss:+.0%}")
    assert f"take {results[1]['rows']['variants']['gpuclassify']['time_ratio']:.2f} times" in growth
