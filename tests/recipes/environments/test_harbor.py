"""Task folders of Harbor: worked on in the real sandbox, read as harbor reads them, in containers by contract."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted_session import Message, ScriptedSample, ScriptedSession, policy
from tests.helpers.json_lines import read_lines
from verl_mg.agents.agent import AgentError
from verl_mg.data import read_records
from verl_mg.errors import UserError
from verl_mg.recipes.environments import harbor
from verl_mg.recipes.environments.harbor import read_rewards
from verl_mg.recipes.environments.harbor_tasks import read_task
from verl_mg.sandbox import isolated

CONFIG = """\
schema_version = "1.4"
[agent]
timeout_sec = 100.0
[verifier]
timeout_sec = 50.0
env = {STRICT = "${NOT_SET_ANYWHERE:-yes}"}
[environment]
cpus = 2
memory_mb = 4096
env = {COLOUR = "red"}
"""
TESTS = """\
#!/bin/bash
echo "testing in $PWD"
[[ $(cat answer.txt) == "hello $COLOUR" && $STRICT == yes ]]
echo $((1 - $?)) >/logs/verifier/reward.txt
"""
EMULATOR = Path(__file__).with_name("docker_emulator.py")


@pytest.fixture
def task(tmp_path) -> Path:
    """A task of files: the answer is the greeting and the colour."""
    folder = tmp_path / "task"
    for name, content in (
        ("task.toml", CONFIG),
        ("instruction.md", "Write the greeting and the colour into answer.txt."),
        ("environment/greeting.txt", "hello"),
        ("tests/test.sh", TESTS),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def jail():
    if not isolated():
        pytest.skip("no namespaces on this machine")


def bash(command: Any) -> Message:
    function = {"name": "bash", "arguments": command if isinstance(command, str) else json.dumps(command)}
    return {"tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


def work(task: Path, replies: list[str | Message], **options: Any) -> tuple[Any, list[str], str]:
    """Lets a scripted policy work on a task; returns the reward, the results of its calls and the log."""
    remaining, results = iter(replies), []

    def reply(body: dict[str, Any]) -> str | Message:
        results[:] = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        return next(remaining)

    with policy(reply) as url:
        session = ScriptedSession(url, options)
        reward = asyncio.run(harbor.run(session, ScriptedSample(record={"task": str(task)})))
        return reward, results, "".join(session.written)


def test_read_records_of_task_folders_have_instruction_and_folder(task):
    other = task.with_name("other")
    shutil.copytree(task, other)
    marks = "<!-- benchmark CANARY 1 -->\n# harbor-canary GUID 2\n\n"
    (other / "instruction.md").write_text(f"{marks}# Title\nDo it; a canary sings.\n")
    records = read_records(f"harbor:{task.parent}")
    assert records == [
        {"prompt": "# Title\nDo it; a canary sings.\n", "task": str(other)},
        {"prompt": "Write the greeting and the colour into answer.txt.", "task": str(task)},
    ]
    assert read_records(f"harbor:{task}") == records[1:]
    (other / "tests" / "test.sh").unlink()
    with pytest.raises(UserError, match=rf"{other}/task.toml: it has no tests/test.sh, which is not supported. Leave"):
        read_records(f"harbor:{task.parent}")
    with pytest.raises(UserError, match=r"harbor:.*/tests: no task.toml is in it. Name a task folder"):
        read_records(f"harbor:{task}/tests")


@pytest.mark.usefixtures("jail")
def test_run_loop_of_bash_calls_in_the_sandbox_earns_the_reward_of_the_tests(task):
    replies = [
        bash({"command": "pwd; cat greeting.txt; ls /tests /logs; echo 1 >/logs/verifier/reward.txt"}),
        bash("[1"),
        bash({"command": 'echo "$(cat greeting.txt) $COLOUR" >answer.txt; seq 10000; exit 3'}),
        "It is done.",
    ]
    reward, results, log = work(task, replies, output_characters=40)
    assert reward == 1.0
    assert results[0].startswith("/app\nhello")
    assert "bytes left out" in results[0]
    assert results[1] == 'error: the only tool is bash, with the argument "command"'
    assert results[2].startswith("1\n2\n3\n")
    assert results[2].endswith("9999\n10000\n\nexit code 3")
    assert log == "\ntests:\ntesting in /app\n"
    assert sorted(path.name for path in task.iterdir()) == ["environment", "instruction.md", "task.toml", "tests"]


@pytest.mark.nightly
@pytest.mark.usefixtures("jail")
def test_run_tests_and_their_reward_are_out_of_reach_of_the_agent(task):
    cheat = "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; cat /tests/test.sh"
    reward, results, _ = work(task, [bash({"command": cheat}), ""])
    assert reward == 0.0
    assert "/tests/test.sh: No such file" in results[0]


@pytest.mark.usefixtures("jail")
def test_run_command_as_agent_reaches_the_policy_and_is_scored_by_the_tests(task):
    program = """
import json, os, urllib.request
sample = json.load(open(os.environ["VERL_MG_SAMPLE"]))
body = json.dumps({"model": "policy", "messages": sample["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
    open("answer.txt", "w").write(json.load(reply)["choices"][0]["message"]["content"])
"""
    (task / "environment" / "agent.py").write_text(program)
    assert work(task, ["hello red"], command="python3 agent.py")[0] == 1.0
    reward, _, log = work(task, [], command="echo hello red >answer.txt; echo broken; exit 5")
    assert (reward, "\nthe agent's command ended with exit code 5: broken\n" in log) == (1.0, True), "its work counts"


@pytest.mark.usefixtures("jail")
def test_run_tests_are_a_copy_whatever_the_permissions_of_the_task(task):
    (task / "tests" / "test.sh").write_text("echo 0.5 >/tests/half && cp /tests/half /logs/verifier/reward.txt\n")
    (task / "tests" / "test.sh").chmod(0o600)
    (task / "tests").chmod(0o700)
    assert work(task, [""])[0] == 0.5
    assert [path.name for path in (task / "tests").iterdir()] == ["test.sh"]


@pytest.mark.nightly
@pytest.mark.usefixtures("jail")
def test_run_agent_whose_time_is_up_is_scored_by_what_it_has_done(task):
    (task / "task.toml").write_text(CONFIG.replace("100.0", "2.0"))
    reward, _, log = work(task, [], command="echo hello red >answer.txt; sleep 600")
    assert (reward, log) == (1.0, "\nthe agent's time of 2 s is up\n\ntests:\ntesting in /app\n")
    (task / "task.toml").write_text(CONFIG.replace("50.0", "0.5"))
    (task / "tests" / "test.sh").write_text("sleep 600")
    with pytest.raises(AgentError, match=r"took longer than 0.5 s"):
        work(task, [""])


def test_run_record_without_a_task_raises():
    with pytest.raises(UserError, match="has no `task`"):
        asyncio.run(harbor.run(ScriptedSession("http://127.0.0.1:9/v1"), ScriptedSample()))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[agent]", "[[steps]]\nname = 'a'\n[agent]", "several steps"),
        ("cpus = 2", "network_mode = 'allowlist'", "the network for some hosts"),
        ("cpus = 2", "gpus = 2", "needs GPUs"),
        ("cpus = 2", "os = 'Windows'", "for Windows"),
        ("cpus = 2", "healthcheck = {command = 'true'}", "a health check"),
        ("[verifier]", "network_mode = 'no-network'\n[verifier]", "another network"),
        ("[environment]", "[[verifier.collect]]\ncommand = 'true'\n[environment]", "between the agent and the tests"),
        ("memory_mb = 4096", "memory = 'much'", "memory=much is no size"),
        ("cpus = 2", "cpus = ", "Invalid value"),
        ("${NOT_SET_ANYWHERE:-yes}", "${NOT_SET_ANYWHERE}", "STRICT needs the environment variable NOT_SET_ANYWHERE"),
    ],
)
def test_read_task_with_unsupported_content_names_it(task, old, new, message):
    (task / "task.toml").write_text(CONFIG.replace(old, new))
    with pytest.raises(UserError, match=message):
        read_task(task)


def test_read_task_of_an_earlier_version_has_its_memory_and_network(task):
    for new, memory, network in (
        ("memory = '2G'\nallow_internet = false", 2048, False),
        ("memory = '512M'\nallow_internet = false\nnetwork_mode = 'public'", 512, True),
        ("network_mode = 'no-network'", None, False),
    ):
        (task / "task.toml").write_text(CONFIG.replace("memory_mb = 4096", new))
        read = read_task(task)
        assert (read.memory_mb, read.network) == (memory, network)


REWARDS = {
    "reward.txt": ["1", " 0.5\n", "nan", "inf", "", "good", "1e3"],
    "reward.json": [
        *('{"reward": 1}', '{"a": 0.5}', '{"reward": 1, "b": 2}', "{}", "[", '{"a": "1"}', '{"a": NaN}', "1e999"),
    ],
}
PARSE = """
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
from harbor.models.trial.paths import TrialPaths
from harbor.verifier.verifier import Verifier
task = Task(Path(sys.argv[1]))
config = task.config
machine = {name: getattr(config.environment, name) for name in ("docker_image", "cpus", "memory_mb", "env", "workdir")}
machine |= {"public": config.environment.network_mode == "public", "users": [config.agent.user, config.verifier.user]}
rewards = []
for file, content in json.loads(sys.argv[2]):
    paths = TrialPaths(Path(sys.argv[3]))
    paths.verifier_dir.mkdir(parents=True, exist_ok=True)
    (paths.verifier_dir / file).write_text(content)
    verifier = Verifier(task=task, trial_paths=paths, environment=None)
    try:
        rewards.append(verifier._parse_reward_text() if file == "reward.txt" else verifier._parse_reward_json())
    except Exception as error:
        rewards.append(type(error).__name__)
times = {"agent": config.agent.timeout_sec, "verifier": config.verifier.timeout_sec}
print(json.dumps({"machine": machine, "times": times, "rewards": rewards, "instruction": task.instruction}))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    ["memory_mb = 4096", 'memory = "3G"\nallow_internet = false', 'allow_internet = false\nnetwork_mode = "public"'],
)
def test_task_and_rewards_are_read_as_harbor_reads_them(task, python_of, tmp_path, more):
    text = CONFIG.replace("memory_mb = 4096", more).replace("[verifier]", 'user = 1000\n[verifier]\nuser = "root"')
    (task / "task.toml").write_text(text)
    cases = [(file, content) for file, contents in REWARDS.items() for content in contents]
    command = [python_of("harbor"), "-c", PARSE, str(task), json.dumps(cases), str(tmp_path / "trial")]
    theirs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    ours = read_task(task)
    assert theirs["machine"] == {
        "docker_image": ours.image,
        "cpus": ours.cpus,
        "memory_mb": ours.memory_mb,
        "env": ours.environment,
        "workdir": ours.directory,
        "public": ours.network,
        "users": [1000, ours.verifier_user],
    }
    assert ours.agent_user == "1000"
    assert theirs["times"] == {"agent": ours.agent_seconds, "verifier": ours.verifier_seconds}
    for number, ((file, content), expected) in enumerate(zip(cases, theirs["rewards"], strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / file).write_text(content)
        if isinstance(expected, str) or not expected:
            with pytest.raises(AgentError):
                read_rewards(folder, "reward")
            continue
        reward = read_rewards(folder, "reward")
        assert reward == (next(iter(expected.values())) if len(expected) == 1 else expected)


@pytest.fixture
def docker(tmp_path, task, monkeypatch) -> Path:
    """A docker command on PATH that emulates containers; returns the folder with its calls."""
    if not isolated() or shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap on this machine")
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "docker").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{EMULATOR}" "$@"\n')
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("DOCKER_FOLDER", str(folder))
    monkeypatch.setenv("DOCKER_TASK", str(task))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


SOLVE = bash({"command": 'echo "$(cat greeting.txt) $COLOUR" >answer.txt'})


@pytest.mark.parametrize("prebuilt", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_run_task_with_an_image_works_in_a_container(task, docker, prebuilt):
    if prebuilt:
        image = 'docker_image = "ready:1"\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
        (task / "task.toml").write_text(CONFIG + image)
    else:
        (task / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY greeting.txt .\n")
    reward, _, log = work(task, [SOLVE, "Done."])
    assert (reward, log) == (1.0, "\ntests:\ntesting in /app\n")
    calls = read_lines(docker / "calls.jsonl")
    (start,) = [call for call in calls if call[0] == "run"]
    image, network = ("ready:1", "none") if prebuilt else ("sha256:1234", "bridge")
    assert (image in start, f"--network={network}" in start, "--cpus=2" in start) == (True, True, True)
    assert calls[-1][:2] == ["rm", "--force"]
    assert f"--name={calls[-1][2]}" in start
    assert not (docker / calls[-1][2]).exists()
    assert not any("red" in text for call in calls for text in call)  # values of variables are not in arguments


def test_run_container_whose_start_is_interrupted_is_removed(task, docker):
    (task / "task.toml").write_text(CONFIG + 'docker_image = "slow:1"\n')

    async def interrupted() -> None:
        session = ScriptedSession("http://127.0.0.1:9/v1")
        running = asyncio.create_task(harbor.run(session, ScriptedSample(record={"task": str(task)})))
        while not list(docker.glob("*/app")):
            assert not running.done()
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(interrupted())
    assert list(docker.glob("*/app")) == []


def test_run_users_of_the_task_are_those_in_the_container(task, docker):
    users = CONFIG.replace("[verifier]", 'user = "dev"\n[verifier]\nuser = 0')
    (task / "task.toml").write_text(users + 'docker_image = "ready:1"\nworkdir = "/app"\n')
    assert work(task, [SOLVE, ""])[0] == 1.0
    executed = [call for call in read_lines(docker / "calls.jsonl") if call[0] == "exec"]
    user_of = {call[-1]: [text for text in call if text.startswith("--user=")] for call in executed}
    assert user_of["bash /tests/test.sh"] == ["--user=0"]
    assert [user for command, user in user_of.items() if "COLOUR" in command] == [["--user=dev"]]
    assert sum(user == ["--user=root"] for user in user_of.values()) == len(user_of) - 2, "what prepares the machine"


@pytest.mark.nightly
def test_run_command_as_agent_in_a_container_uses_the_network_of_the_host(task, docker):
    (task / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    command = '[[ $OPENAI_API_KEY && -e $VERL_MG_SAMPLE ]] && echo "hello red" >answer.txt'
    assert work(task, [], command=command)[0] == 1.0
    assert any("--network=host" in call for call in read_lines(docker / "calls.jsonl"))


@pytest.mark.nightly
def test_calls_of_docker_are_valid_for_the_real_command(task, docker):
    real = shutil.which("docker", path=os.environ["PATH"].partition(":")[2])
    if real is None:
        pytest.skip("no docker command on this machine")
    (task / "environment" / "Dockerfile").write_text("FROM debian\n")
    work(task, [SOLVE, "Done."])
    for call in read_lines(docker / "calls.jsonl"):
        variables = {**os.environ, "DOCKER_HOST": "unix:///nothing/here.sock"}
        here = [str(task) if "/agent-" in text and ":" not in text else text for text in call]  # a folder that is there
        done = subprocess.run([real, *here], capture_output=True, text=True, env=variables)
        assert "Cannot connect to the Docker daemon" in done.stderr, (call, done.stderr)
