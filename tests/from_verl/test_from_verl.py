"""`verl-mg from-verl`: published jobs of verl, every key of the table, and keys of which nothing is known."""

import json
import random
import re
import subprocess
from operator import attrgetter
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from tests.from_verl.arrivals import NAMES, arrivals
from tests.helpers.machine import PEERS
from verl_mg.cli import main
from verl_mg.config import load_config
from verl_mg.config.effects import without_effect
from verl_mg.errors import UserError
from verl_mg.from_verl.job import DEFAULTS
from verl_mg.from_verl.reading import LONG, SHORT
from verl_mg.from_verl.remarks import UNREAD
from verl_mg.from_verl.shell import trainer_arguments
from verl_mg.from_verl.table import ROWS
from verl_mg.from_verl.translate import Translation, recipe_name, translate
from verl_mg.job.recipe import load_recipe, requested_roles

PUBLISHED = Path(__file__).parent / "published"
PEER = PEERS / "verl" / "trainer" / "config"
LINE = re.compile(r"(no counterpart|ask|ignored|unknown): [\w.*]+(=.+|(, [\w.*]+)*): [^\s:].*")
"""A remark: its kind, a key with its value or several keys, and a text."""
LEAST = {"actor_rollout_ref": {"rollout": {"name": "vllm"}}}
EXPECTED = {
    "grpo_fsdp_vllm.sh": {
        "recipe": "grpo", "actor.backend": "fsdp", "actor.layout": "tp1", "actor.tokens_per_micro_batch": 24576,
        "actor.optimizer.weight_decay": 0.01, "reference.offload": True, "rollout.layout": "tp2",
        "algorithm.num_minibatches": 4, "algorithm.group_size": 5, "algorithm.kl.coefficient": 0.001,
        "algorithm.kl.estimator": "k3", "algorithm.dual_clip": 3.0, "algorithm.loss_aggregation": "token-mean",
        "data.overlong_prompts": "drop", "evaluation.every": 5, "evaluation.prompts": None, "checkpoint.every": 20,
        "remarks": {"data.train_files", "reward.custom_reward_function.path", "trainer.total_epochs"},
    },
    "dapo_fsdp_vllm.sh": {
        "recipe": "dapo", "actor.layout": "cp8", "actor.tokens_per_micro_batch": 8 * 22528, "actor.offload": True,
        "actor.optimizer.warmup_steps": 160, "rollout.max_new_tokens": 20480, "rollout.layout": "tp4",
        "algorithm.overlong_buffer": 4096, "algorithm.clip_high": 0.28, "algorithm.dual_clip": 10.0,
        "algorithm.num_minibatches": 16, "evaluation.temperature": 1.0, "evaluation.top_p": 0.7,
        "remarks": {"data.truncation", "reward.custom_reward_function.path", "trainer.total_epochs"},
    },
    "ppo_fsdp_sglang.yaml": {
        "recipe": "ppo", "critic.backend": "fsdp", "critic.optimizer.lr": 1e-5, "critic.path": None,
        "critic.tokens_per_micro_batch": 98304, "algorithm.lam": 1.0, "algorithm.critic_lam": 1.0,
        "algorithm.critic_warmup": 2, "algorithm.value_clip": 0.5, "algorithm.kl.coefficient": 0.0,
        "rollout.engine": "sglang", "job.iterations": 105, "remarks": {"reward.custom_reward_function.path"},
    },
    "grpo_megatron_vllm.sh": {
        "recipe": "grpo", "actor.backend": "megatron", "actor.layout": "tp4-pp3-ep4-etp1",
        "reference.layout": "tp4-pp3-ep4-etp1", "actor.recompute": True, "actor.tokens_per_micro_batch": 16 * 3072,
        "rollout.layout": "tp4", "job.iterations": 200, "evaluation.every": 0,
        "remarks": {"actor_rollout_ref.model.trust_remote_code", "reward.custom_reward_function.path"},
    },
    "rloo_fsdp_vllm.yaml": {
        "recipe": "rloo", "algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1",
        "algorithm.kl.coefficient": 0.001, "rollout.memory_fraction": 0.5, "reference.backend": "fsdp",
    },
    "reinforce_plus_plus_megatron_sglang.yaml": {
        "recipe": "reinforce_plus_plus", "actor.layout": "tp2-cp2", "reference.layout": "tp2-cp2",
        "actor.optimizer.schedule": "cosine", "actor.optimizer.warmup_steps": 40, "actor.optimizer.decay_steps": 400,
        "actor.optimizer.min_lr": 1e-7, "algorithm.gamma": 0.99, "algorithm.kl.estimator": "k2",
        "reward.function": "verl:my_reward.py:score", "reward.options": {"factor": 2},
        "job.output": Path("checkpoints/verl_examples/qwen"), "remarks": set(),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def least(tmp_path_factory) -> Path:
    """A file of verl in which almost everything is a default."""
    file = tmp_path_factory.mktemp("least") / "job.yaml"
    file.write_text(yaml.safe_dump(LEAST))
    return file


def value_of(done: Translation, key: str) -> object:
    known = {"recipe": done.recipe.name, "ranks": done.job.ranks}
    if key in known:
        return known[key]
    if key.startswith("unused."):  # until somebody writes the tools
        return done.unused[key.removeprefix("unused.")]
    section, _, name = key.rpartition(".")
    holder = attrgetter(section)(done.config)
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


@pytest.mark.parametrize("name", EXPECTED)
def test_from_verl_of_a_published_job_writes_a_file_that_means_the_same(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    out = tmp_path / "ours.yaml"
    main(["from-verl", str(PUBLISHED / name), "--output", str(out)])
    expected = dict(EXPECTED[name])
    recipe, remarks = str(expected.pop("recipe")), expected.pop("remarks", None)
    assert f"-m verl_mg train recipes/{recipe}.py --config {out}" in out.read_text()
    config = load_config(out, [], load_recipe(recipe).config)
    assert {key: attrgetter(key)(config) for key in expected} == expected
    assert not list(without_effect(config, requested_roles(load_recipe(recipe), config)))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    serious = {re.split(r"[=:,] ?", line.split(": ", 1)[1])[0] for line in lines if not line.startswith("ignored")}
    assert remarks is None or serious == remarks


@pytest.mark.parametrize("chosen", [slice(i, None, 4) for i in range(4)])
def test_from_verl_key_of_the_table_arrives_with_its_value(least, chosen):
    for key, value, context, ours, expected in arrivals()[chosen]:
        name = key.replace("*", NAMES.get(key.replace(LONG, SHORT), "x"))
        done = translate(least, [*context, f"{name}={value}"])
        found, wanted = value_of(done, ours), yaml.safe_load(expected)
        found = json.loads(json.dumps(found, default=str))  # lists for tuples, text for paths
        assert found == pytest.approx(wanted) if isinstance(wanted, float) else found == wanted, (key, context)
        lost = [r for r in done.remarks if key.replace(LONG, SHORT) in r.keys and r.kind != "ask"]
        assert not lost or ours.startswith("unused."), key
        assert not list(without_effect(done.config, requested_roles(done.recipe, done.config))), key


def test_from_verl_every_key_of_the_table_has_an_arrival():
    tested = {key.replace(LONG, SHORT) for key, *_ in arrivals()}
    claimed = {key for row in ROWS for key in row.theirs}
    assert claimed - tested - {"aorr.rollout.quantization.*"} == set()
    assert len(claimed) > 150


def test_from_verl_what_a_file_leaves_out_has_verls_defaults(least):
    """Defaults of verl that differ from ours, typed from its documentation."""
    grpo = translate(least, ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]).config
    ppo = translate(least, ["critic.model.path=c"]).config
    for config in (grpo, ppo):
        assert (config.actor.optimizer.weight_decay, config.algorithm.dual_clip) == (0.01, 3.0)
        assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens) == (512, 512)
        assert (config.model.dtype, config.actor.backend, config.actor.recompute) == ("bfloat16", "fsdp", True)
        assert (config.algorithm.prompts_per_iteration, config.algorithm.num_minibatches) == (1024, 4)
        assert (config.rollout.layout, config.rollout.memory_fraction) == ("tp2", 0.5)
        assert (config.evaluation.every, config.evaluation.prompts, config.tracking.services) == (0, None, ["wandb"])
    assert grpo.algorithm.loss_aggregation == "token-mean"
    assert (ppo.algorithm.lam, ppo.algorithm.critic_lam, ppo.algorithm.group_size) == (1.0, 1.0, 1)
    assert (ppo.critic.optimizer.lr, ppo.critic.optimizer.weight_decay) == (1e-5, 0.01)


def test_from_verl_of_data_that_is_here_counts_iterations_and_shares(least, tmp_path):
    for name, rows in (("a", 2048), ("b", 1024)):
        parquet.write_table(pyarrow.table({"x": range(rows)}), tmp_path / f"{name}.parquet")
    files = f"data.train_files=[{tmp_path}/a.parquet,{tmp_path}/b.parquet]"
    done = translate(least, ["critic.model.path=c", files, "trainer.total_epochs=4"])
    assert done.config.job.iterations == 12
    assert [source.weight for source in done.config.data.train.values()] == [2048, 1024]


REFUSED = {
    "not a job": ([], {"model": {"path": "m"}}, "no section actor_rollout_ref"),
    "another configuration of ours": ([], {"algorithm": {"group_size": 2}}, "no section actor_rollout_ref"),
    "a list": ([], ["a"], "not a mapping"),
    "no recipe": (["algorithm.adv_estimator=grpo_passk"], LEAST, "algorithm.adv_estimator=grpo_passk: no recipe"),
    "no pair": (["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], LEAST, "loss_mode=gspo: no recipe has it"),
    "two penalties": (
        ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"], LEAST, "one KL penalty",
    ),
    "parts": (["actor_rollout_ref.actor.ppo_mini_batch_size=1000"], LEAST, "does not divide the 1024 prompts"),
    "a word": (["data.train_batch_size=many"], LEAST, "data.train_batch_size"),
    "an engine": (["actor_rollout_ref.rollout.name=trtllm"], LEAST, "rollout.name=trtllm: there is no such engine"),
    "one sample": (["algorithm.adv_estimator=grpo"], LEAST, "algorithm.group_size: 1 is invalid"),
    "an end": (["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"], LEAST, "Add trainer.total_training_steps"),
    "a layout": (["model_engine=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"], LEAST,
                 "actor.layout"),
    "a limit": (["actor_rollout_ref.rollout.top_k=many"], LEAST, "rollout.top_k=many: not a number"),
    "no last step": (["actor_rollout_ref.actor.optim.lr_warmup_steps=.inf"], LEAST, "lr_warmup_steps=inf: not a whole"),
    "half a GPU": (["actor_rollout_ref.rollout.data_parallel_size=0.5"], LEAST, "data_parallel_size=0.5: not a whole"),
    "no list": (["trainer.logger=5"], LEAST, "trainer.logger=5: not a list of names"),
    "a bound": (["algorithm.rollout_correction.rollout_is=token",
                 "algorithm.rollout_correction.rollout_is_threshold=a_b"], LEAST, "rollout_is_threshold=a_b: not 2.0"),
    "two bounds for three": (["algorithm.rollout_correction.rollout_rs='token_k1,seq_sum_k1,seq_max_k2'",
                              "algorithm.rollout_correction.rollout_rs_threshold='2.0,3.0'"], LEAST, "3 criteria"),
    "an unknown key": (["trainer.experiment_name=a_${trainer.nothing}"], LEAST, "does not have"),
    "the environment": (["trainer.experiment_name=${oc.env:NO_SUCH_NAME}"], LEAST, "not set in the environment"),
    "a circle": (["data.max_prompt_length=${data.max_response_length}",
                  "data.max_response_length=${data.max_prompt_length}"], LEAST, "refers to itself"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_from_verl_of_what_no_job_here_means_is_one_line(case, tmp_path, capsys):
    overrides, tree, words = REFUSED[case]
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(SystemExit) as ended:
        main(["from-verl", str(file), *overrides])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def test_from_verl_script_whose_value_depends_on_its_run_names_the_key(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "if nvidia-smi; then\n  gpus=4\nfi\nname=run_$(date)\n"
        "python -m verl.trainer.main_ppo critic.model.path=c trainer.n_gpus_per_node=$gpus \\\n"
        '    trainer.experiment_name="$name" actor_rollout_ref.rollout.name=vllm trainer.nnodes=$NOWHERE\n'
    )
    with pytest.raises(UserError, match=r"trainer.n_gpus_per_node: .* Add .*=VALUE trainer.experiment_name=VALUE"):
        translate(script, [])
    given = ["trainer.n_gpus_per_node=4", "trainer.experiment_name=e", "trainer.nnodes=1"]
    assert translate(script, given).job.ranks == 4
    script.write_text("echo python -m something.else\n")
    with pytest.raises(UserError, match="no command"):
        translate(script, [])


WORDS = {  # as bash splits them
    "COMMON='a.x=1 a.y=2'\npython -m verl.trainer.main_ppo $COMMON b=\"$COMMON\"": ["a.x=1", "a.y=2", "b=a.x=1 a.y=2"],
    "A='1 2'\nB=$A C=$A\npython -m verl.trainer.main_ppo b=\"$B\" c=\"$C\"": ["b=1 2", "c=1 2"],
    "P=/a\nP+=/b\npython -m verl.trainer.main_ppo p=$P > log 2>&1 q=1 | tee log": ["p=/a/b", "q=1"],
    "L=(a=1 'b=2 3')\nL+=(c=4)\npython -m verl.trainer.main_ppo ${L[@]} \"${L[@]}\" d=$L \"${@:2}\"":
        ["a=1", "b=2", "3", "c=4", "a=1", "b=2 3", "c=4", "d=a=1"],
    "E=\npython -m verl.trainer.main_ppo $E x=$E ${1:-y=1}": ["x=", "y=1"],
    "python -m verl.trainer.main_ppo --config-name x -cn y": ["--config-name", "x", "-cn", "y"],
}  # fmt: skip


@pytest.mark.parametrize("script", WORDS)
def test_from_verl_script_has_the_words_that_bash_gives_to_its_trainer(script, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(script)
    bash = re.sub(r"python -m \S+", "printf '%s\\\\n'", script.replace("> log", "")).replace("| tee log", "")
    expected = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True).stdout.splitlines()
    assert trainer_arguments(file, []) == expected
    assert expected == WORDS[script]


@pytest.mark.parametrize("value", ["$1", "$2", "$#", "$?", "${1}", "x_$1"])
def test_from_verl_script_whose_value_is_an_argument_names_the_key(value, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"python -m verl.trainer.main_ppo trainer.nnodes={value}\n")
    with pytest.raises(UserError, match=r"trainer.nnodes: depends on the run of the script. Add trainer.nnodes=VALUE"):
        trainer_arguments(file, [])


WITH_LEAST = ["actor_rollout_ref.rollout.name=vllm", "critic.model.path=c"]


@pytest.mark.parametrize("words", [["--config-name", "ppo_megatron_trainer"], ["-cn", "ppo_megatron_trainer.yaml"]])
def test_from_verl_name_of_a_configuration_is_the_next_word_too(words, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"python -m verl.trainer.main_ppo {' '.join([*words, *WITH_LEAST])}\n")
    assert translate(file, []).config.actor.backend == "megatron"


NOT_UNDERSTOOD = ("--config-path=mine", "--config-dir=mine", "~trainer.logger", "--multirun", "trainer",
                  "--config-name=m", "~trainer.logger=x", "reward@x=y", "-cn m")  # fmt: skip


@pytest.mark.parametrize("words", NOT_UNDERSTOOD)
def test_from_verl_of_words_that_are_no_values_is_an_error(words, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"python -m verl.trainer.main_ppo {' '.join([*WITH_LEAST, words])}\n")
    with pytest.raises(UserError, match=re.escape(words)):
        translate(file, [])


VALUES = (True, False, None, 0, 1, 2, 8, -1, 0.5, "x", "token", "grpo", "megatron", [1], ["a"], {}, 1024, "1e-3")


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in range(1, 40))])
def test_from_verl_of_random_keys_names_each_that_is_not_in_the_result(least, tmp_path, seed):
    chance = random.Random(seed)
    unread = [name.removesuffix(".*") for unread in UNREAD for name in unread.keys]
    names = [*DEFAULTS, *unread, *(f"{name}.deeper" for name in unread)]
    done = 0
    for number in range(60):
        tree: dict = {}
        keys = {chance.choice(names): chance.choice(VALUES) for _ in range(chance.choice((1, 2, 6)))}
        keys[f"made_up.key_{number}"] = 1
        for key, value in {"aorr.rollout.name": "vllm", "critic.model.path": "c", **keys}.items():
            *parents, last = key.split(".")
            node = tree
            for parent in parents:
                node = node[parent] if isinstance(node.get(parent), dict) else node.setdefault(parent, {})
                node = node if isinstance(node, dict) else {}
            node[last] = value
        tree["actor_rollout_ref"] = tree.pop("aorr")
        file = tmp_path / "random.yaml"
        file.write_text(yaml.safe_dump(tree))
        try:
            found = translate(file, [])
        except UserError as error:
            assert len(str(error).splitlines()) == 1
            continue
        done += 1
        named = {key for remark in found.remarks for key in remark.keys}
        assert f"made_up.key_{number}" in named
        for key in found.job.given:
            assert key in named or any(row.reads(key) for row in ROWS), key
    assert done > 10


A, RC = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ROLLOUT, OVERLONG = "actor_rollout_ref.rollout", "reward.reward_kwargs.overlong_buffer_cfg"
OF_MEGATRON = f"{A}.megatron.override_transformer_config"
PPO = "critic.model.path=c"
GRPO = f"algorithm.adv_estimator=grpo {ROLLOUT}.n=2"
OTB = f"algorithm.adv_estimator=tir_optimal_token_baseline {ROLLOUT}.n=2"
FILTERED = f"{GRPO} algorithm.filter_groups.enable=true"
DAPO = f"{FILTERED} reward.reward_manager.name=dapo {OVERLONG}.enable=true"
MEGATRON = f"{GRPO} model_engine=megatron {OF_MEGATRON}.recompute_granularity=selective"
FATES = f"""
{OVERLONG}.penalty_factor=0.5 | {DAPO} | no counterpart
{OVERLONG}.enable=true | {GRPO} {OVERLONG}.len=3 | ignored
algorithm.filter_groups.metric=len | {FILTERED} | no counterpart
{RC}.loss_type=reinforce | {GRPO} {RC}.bypass_mode=true | no counterpart
{RC}.bypass_mode=false | {OTB} |
{RC}.bypass_mode=true | {OTB} | no counterpart
critic.loss_agg_mode=seq-mean-token-mean | {PPO} | no counterpart
{A}.loss_scale_factor=100 | {GRPO} {A}.loss_agg_mode=seq-mean-token-sum-norm | no counterpart
{A}.fsdp_config.mixed_precision.param_dtype=bf16 | {GRPO} | no counterpart
{A}.fsdp_config.wrap_policy.min_num_params=9 | {GRPO} | no counterpart
{A}.fsdp_config.fsdp_sizes=9 | {GRPO} | unknown
{A}.fsdp_config.dtype=[bf16] | {GRPO} | no counterpart
{A}.megatron.tensor_parallel=9 | {GRPO} | unknown
{OF_MEGATRON}.recompute_modules=[mlp,nothing] | {MEGATRON} | no counterpart
critic.megatron.router_replay.mode=R3 | {GRPO} | no counterpart
critic.fsdp.typing_error=1 | {GRPO} | unknown
{ROLLOUT}.engine_kwargs.other.x=1 | {GRPO} | unknown
{ROLLOUT}.multi_turn.max_parallel_calls=1 | {GRPO} | ignored
{ROLLOUT}.multi_turn.max_parallel_calls=true | {GRPO} | ask
{ROLLOUT}.agent.num_workers=256 | {GRPO} | ask
reward.reward_model.rollout.typing_error=1 | {GRPO} | unknown
data.shuffle=false | {GRPO} | no counterpart
trainer.resume_mode=disable | {GRPO} | ask
trainer.val_before_train=True | {GRPO} trainer.test_freq=0 | no counterpart
"""
"""Of a value: overrides of its job, and the kind of the line about its key."""


@pytest.mark.parametrize("fate", FATES.strip().splitlines())
def test_from_verl_line_about_a_key_says_what_becomes_of_its_value(fate, least):
    override, context, kind = (part.strip() for part in fate.split("|"))
    done = translate(least, [*context.split(), override])
    assert (done.recipe.name == "otb") == (context == OTB)
    key = override.partition("=")[0]
    found = [remark for remark in done.remarks if key.replace(LONG, SHORT) in remark.keys]
    assert [remark.kind for remark in found] == ([kind] if kind else [])
    assert all(remark.line(done.job).startswith(f"{kind}: {key}=") for remark in found if len(remark.keys) == 1)


@pytest.mark.skipif(not PEER.exists(), reason="verl is installed by tools/install/peers.sh")
def test_defaults_of_verl_are_those_of_its_files():
    known: dict = {}
    for name in ("_generated_ppo_megatron_trainer.yaml", "_generated_ppo_trainer.yaml"):
        known |= _flat(yaml.safe_load((PEER / name).read_text(encoding="utf-8")))
    # Without references to other keys, and two keys of which the file has no value that means anything.
    plain = set(DEFAULTS) & set(known) - {"aorr.rollout.name", "critic.model.path"}
    ours = {key: DEFAULTS[key] for key in plain if not str([known[key], DEFAULTS[key]]).count("${")}
    assert {key: value for key, value in ours.items() if (value or None) != (known[key] or None)} == {}
    assert len(ours) > 100
    read = {key for key, value in known.items() if value and any(row.reads(key) for row in ROWS)}
    assert {key for key in read - set(DEFAULTS) if "${" not in str(known[key])} == set()


@pytest.mark.skipif(not PEER.exists(), reason="verl is installed by tools/install/peers.sh")
@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_from_verl_of_the_files_with_all_of_verls_keys_knows_each(name):
    done = translate(PEER / f"_generated_{name}.yaml", ["critic.model.path=c", "actor_rollout_ref.rollout.name=vllm"])
    assert {(remark.kind, *remark.keys) for remark in done.remarks if remark.kind != "ignored"} == {
        ("no counterpart", "trainer.val_before_train"),
        ("ask", "reward.custom_reward_function.path"),
        ("ask", "trainer.total_epochs"),
    }


def _flat(tree: dict, prefix: str = "") -> dict:
    found: dict = {}
    for name, value in tree.items():
        key = f"{prefix}{name}".replace(LONG, SHORT)
        found |= _flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


def test_recipe_of_a_job_is_that_of_its_advantage_and_loss(least):
    from verl_mg.from_verl.job import VerlJob

    job = VerlJob({"algorithm.adv_estimator": "grpo", "aorr.actor.policy_loss.loss_mode": "geo_mean"})
    assert recipe_name(job) == "gmpo"
