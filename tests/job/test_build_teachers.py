"""Sources and their teachers: which teacher has which, and what is refused."""

import pytest

from verl_mg.config import load_config
from verl_mg.errors import UserError
from verl_mg.job.build_teachers import remote_teacher, teacher_numbers
from verl_mg.recipes import gkd

TWO = "data.train={math: {path: m.jsonl}, code: {path: c.jsonl}}"


def config(*overrides: str):
    return load_config(None, ["model.path=m", "data.train=t.jsonl", *overrides], gkd.Config)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"": 0}),
        (["teachers={a: {path: a}}"], {"": 0}),
        ([TWO, "teachers={a: {path: a}}"], {"math": 0, "code": 0}),
        ([TWO, "teachers={a: {path: a}, b: {path: b, sources: [math]}}"], {"math": 1, "code": 0}),
        ([TWO, "teachers={a: {path: a, sources: [code]}, b: {path: b, sources: [math]}}"], {"math": 1, "code": 0}),
    ],
)
def test_each_source_has_the_teacher_that_names_it_or_the_one_without(overrides, expected):
    assert teacher_numbers(config(*overrides)) == expected


@pytest.mark.parametrize(
    ("teachers", "message"),
    [
        ("{a: {path: a, sources: [maths]}}", "teachers.a.sources: no source 'maths'. data.train has math, code."),
        ("{a: {path: a, sources: [math]}}", "teachers: the source 'code' of data.train has none. Add it"),
        ("{a: {path: a}, b: {path: b}}", "teachers.b.sources: another teacher has none either. Name the sources"),
        (
            "{a: {path: a, sources: [math]}, b: {path: b, sources: [math]}}",
            "teachers.b.sources: 'math' has another teacher already. Name it once.",
        ),
    ],
)
def test_sources_without_one_teacher_are_refused(teachers, message):
    with pytest.raises(UserError) as error:
        teacher_numbers(config(TWO, f"teachers={teachers}"))
    assert str(error.value).startswith(message)


def test_teacher_on_a_server_needs_temperature_one_and_its_key(monkeypatch):
    server = "teachers={a: {url: 'http://h:1', api_key_env: TEACHER_KEY}}"
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UserError, match=r"teachers.a.url: servers return log-probs at temperature 1.*=0.7. Write"):
        remote_teacher(config(server, "rollout.temperature=0.7"), "a", "http://h:1")
    with pytest.raises(UserError, match=r"teachers.a.api_key_env=TEACHER_KEY: this environment variable is not set"):
        remote_teacher(config(server), "a", "http://h:1")


def test_teacher_on_a_server_has_the_options_of_its_section(models):
    options = "url: 'http://h:1', protocol: openai, served_model: large, parallel: 3"
    teacher = remote_teacher(
        config(f"teachers={{a: {{{options}}}}}", f"model.path={models['qwen3']}"), "a", "http://h:1"
    )
    assert (teacher._server.protocol, teacher._server.model, teacher._parallel) == ("openai", "large", 3)
