"""For every test; and which tests only the long campaigns run, so that ``make test`` stays quick: one place to see what it leaves out."""

import gc
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from drawn import draw, is_whole_suite, run_too
from hypothesis import HealthCheck, settings
from time_left import TimeLeftLines
from warm import WarmStart

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As for what a shell starts in the background. Jobs of tests inherit it, and must hear an interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Jobs of tests start without torch's compiler: see there.
_QUICK_START = str(Path(__file__).parent / "support" / "quick_start")
if _QUICK_START not in os.environ.get("PYTHONPATH", ""):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_QUICK_START, os.environ.get("PYTHONPATH"))))

# How long an example takes says nothing on a busy machine.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

LONG = (
    # What takes longest, where a contract test or a neighbour shows the same in less.
    "chaos/test_script_epochs.py::test_a_notice_between_two_loops_saves_the_end_of_the_last_one[a second rank has died]",
    "chaos/test_script_epochs.py::test_a_notice_between_two_loops_saves_the_end_of_the_last_one[in a loop that was left]",
    "chaos/test_scripts_of_people.py::test_with_is_lead_the_next_rank_saves_and_logs_when_rank_0_dies[metric]",
    "chaos/test_wire.py::test_killed_workers_change_no_bit[tree-bf16-2]",
    "chaos/test_ddp_devices.py::test_no_wait_can_be_left_out_however_a_script_learns_that_a_collective_has_completed",
    "chaos/test_ddp_ordered.py::test_messages_and_a_death_keep_the_order",
    "chaos/test_foreign_launchers.py::test_they_resume_on_another_number_of_processes_with_the_same_bits",
    "chaos/test_indexed_job.py::test_pods_come_back_by_their_index_and_no_bit_changes[killed-and-drained]",
    "chaos/test_net_faults.py::test_a_node_is_cut_off_for_a_moment_and_another_for_so_long",
    "chaos/test_net_faults.py::test_workers_that_recover_again_and_again_for_nothing_are_started_again_and_not_before_the_time[600]",
    "chaos/test_nodes.py::test_with_etcd_no_launcher_is_special_and_a_member_of_etcd_may_die_too",
    "chaos/test_reinit.py::test_without_the_optimizers_state_in_the_snapshot_the_bits_are_others",
    "chaos/test_sharded.py::test_between_steps_a_worker_has_only_what_it_holds",
    "chaos/test_partial.py::test_a_stage_that_was_never_saved_begins_anew_and_a_shard_makes_the_job_begin_again",
    "chaos/test_partial.py::test_with_too_few_workers_the_lost_part_is_restored_and_all_is_saved",
    "chaos/test_pipeline.py::test_a_job_goes_on_from_its_checkpoints_with_other_numbers_of_workers",
    "chaos/test_pipeline.py::test_new_workers_get_a_part_and_compute_it_though_all_who_began_are_gone",
    "chaos/test_sick_devices.py::test_a_device_that_is_lost_in_an_all_reduce",
    "gpu/test_benchmarks.py::test_a_cluster_of_processes_on_the_cpu_passes",
    "gpu/test_one_gpu.py::test_a_section_with_kills_holds[staged-cpu]",
    "gpu/test_one_gpu.py::test_a_section_with_kills_holds[sick-cpu]",
    "gpu/test_one_gpu.py::test_a_section_with_kills_holds[lifecycles-cpu]",
    "lab/test_campaign_killed.py::test_a_campaign_that_is_killed_again_and_again_gives_the_table_of_the_undisturbed_one",
    "chaos/test_foreign_launchers.py::test_processes_of_torchrun_end_with_the_bits_of_holdfast_run",
    "chaos/test_foreign_launchers.py::test_each_survivor_ends_when_a_process_raises_or_leaves_training",
    "chaos/test_hangs.py::test_what_takes_long_by_nature_is_no_hang",
    "chaos/test_hangs.py::test_who_waited_for_one_that_is_stuck_in_a_checkpoint_longer_than_a_stall_takes_goes_on_without_it",
    "chaos/test_net_faults.py::test_workers_that_recover_again_and_again_for_nothing_are_started_again_and_not_before_the_time[2]",
    "chaos/test_node_health.py::test_an_unfit_node_stays_out_the_others_train_without_it_and_it_joins_once_it_is_fit",
    "chaos/test_ddp_devices.py::test_the_contract_of_torch_distributed_holds[some]",
    "chaos/test_exact_ulfm.py::test_killed_workers_change_no_bit[cnn-adam-",
    # Long by what they count; shorter ones of the same file run every time.
    "chaos/test_streams.py::test_the_multiset_of_100_000_samples_is_exact_on_8_then_5_then_7_workers",
    "chaos/test_foreign_launchers.py::test_a_task_of_srun_that_dies_at_its_start_is_named_and_the_others_end_or_begin_without_it[begins",
    # At other steps, or for other kinds of stream, what a neighbour shows.
    # The same on other hosts, after other deaths, or with more workers than a neighbour needs to show it.
    "chaos/test_certificate.py::test_a_bit_that_flipped_in_one_worker_does_not_come_out_again",
    "chaos/test_backward_overlap.py::test_it_is_so_between_hosts",
    "chaos/test_backward_overlap.py::test_a_worker_that_dies_in_what_it_has_begun_changes_no_bit[first-prepared]",
    "chaos/test_ddp_devices.py::test_a_device_that_is_lost_during_a_copy_ends_its_rank_alone",
    "chaos/test_foreign_launchers.py::test_one_process_that_is_killed_resumes_too",
    "chaos/test_launcher_death.py::test_workers_whose_launcher_dies_save_and_end_and_nothing_is_lost[and the lead dies",
    "chaos/test_partial.py::test_backups_change_no_bit_as_long_as_nobody_dies[sharded]",
    "chaos/test_seats.py::test_a_newcomer_takes_the_seat_of_a_killed_rank[ulfm-spare]",
    "chaos/test_seats.py::test_training_that_ends_before_a_newcomer_is_ready_does_not_wait_for_it",
    "chaos/test_sharded.py::test_killed_workers_change_no_bit[ulfm-killed0-inject0]",
    # With other parameters, or on the other fabric, what a neighbour shows in every run.
    "chaos/test_streams.py::test_a_job_on_a_stream_shrinks_and_is_resumed_and_no_sample_is_missed_or_repeated[with a state, read ahead]",
    "chaos/test_partial.py::test_a_part_that_was_just_saved_is_restored_to_the_bit[pipeline-ulfm]",
    "chaos/test_devices.py::test_with_real_workers_a_model_stays_on_its_device_when_one_dies_and_when_one_joins[sharded]",
    "chaos/test_launcher_death.py::test_nothing_is_left_where_what_would_end_it_is_stopped_when_the_launcher_dies[ulfm-a pair]",
    "chaos/test_flips.py::test_what_goes_into_the_sum_leaves_replicas_equal_and_wrong",
    "chaos/test_partial.py::test_backups_change_no_bit_as_long_as_nobody_dies[pipeline]",
    "chaos/test_partial.py::test_without_backups_only_the_lost_part_is_loaded",
    "chaos/test_checkpoint_s3.py::test_a_job_that_dies_is_resumed_from_s3",
    "chaos/test_rejoin.py::test_a_newcomer_that_cannot_start_or_comes_too_late_does_not_hold_the_job",
    "chaos/test_rejoin.py::test_under_restart_a_newcomer_goes_back_with_the_others",
    "chaos/test_devices.py::test_with_real_workers_a_model_stays_on_its_device_when_one_dies_and_when_one_joins[respawn]",
    "chaos/test_devices.py::test_with_real_workers_a_model_stays_on_its_device_when_one_dies_and_when_one_joins[pipeline]",
    "chaos/test_devices.py::test_without_the_wait_for_terms_the_bits_are_others",
    "chaos/test_ddp.py::test_an_unmodified_script_goes_on_when_two_of_four_die[gloo-",
    "chaos/test_exact_gloo.py::test_killed_workers_change_no_bit[first-step",
    "chaos/test_hosts.py::test_a_worker_that_dies_anywhere_in_a_sum",
    "chaos/test_hosts.py::test_the_contract_holds_between_hosts_and_every_bit_is_that_of_one_process[a-whole",
    "chaos/test_hosts_gloo.py::test_a_worker_that_dies_anywhere_in_a_sum",
    "chaos/test_hosts_gloo.py::test_no_byte_more_leaves_a_host_than_its_groups_and_results_have",
    "chaos/test_hosts_gloo.py::test_the_contract_holds_between_hosts",
    "chaos/test_launcher_death.py::test_workers_whose_launcher_dies_save_and_end_and_nothing_is_lost[and a worker",
    "chaos/test_launcher_death.py::test_workers_whose_launcher_dies_save_and_end_and_nothing_is_lost[while the others",
    "chaos/test_nodes.py::test_without_the_first_launcher_all_save_and_stop_and_the_job_can_be_resumed",
    "chaos/test_preemption.py::test_a_notice_ends_the_run_with_its_state_saved_and_it_goes_on_to_the_same_bits[and the lead is gone at",
    "chaos/test_preemption.py::test_a_notice_ends_the_run_with_its_state_saved_and_it_goes_on_to_the_same_bits[while a",
    "chaos/test_resume.py::test_a_worker_that_dies_with_its_part_of_a_checkpoint_leaves_the_others_to_go_on[forward]",
    "chaos/test_hangs.py::test_workers_that_get_stuck_are_found_ended_and_done_without[gloo",
    "chaos/test_hosts.py::test_each_chunk_crosses_once_from_host_to_host",
    "chaos/test_preemption.py::test_a_notice_ends_the_run_with_its_state_saved_and_it_goes_on_to_the_same_bits[and the lead is gone while",
    "chaos/test_preemption.py::test_a_step_that_outlasts_the_grace_ends_the_run_with_an_older_checkpoint",
    "chaos/test_checkpoint_crash.py::test_the_next_save_goes_on_after_a_killed_writer_and_removes_what_it_left",
    "chaos/test_hosts.py::test_training_between_hosts_ends_with_the_bits_of_virtual_workers_though_a_worker_dies",
    "chaos/test_launcher_death.py::test_workers_whose_launcher_dies_save_and_end_and_nothing_is_lost[in a step",
    "chaos/test_pipeline.py::test_two_twins_of_a_stage_that_die_at_once_take_all_back",
    "chaos/test_resume.py::test_a_disk_that_takes_no_checkpoint_costs_warnings_and_not_the_run[limit]",
    "chaos/test_ddp.py::test_every_kind_of_reducer_goes_on[gloo]",
    "chaos/test_pipeline.py::test_in_one_of_two_chains_a_twin_or_a_spare_takes_over[options0",
    "chaos/test_start.py::test_an_mpirun_that_is_stopped_or_killed_before_training_is_started_again[9]",
    # What takes long on the second fabric, in a second form, or beside a contract test that shows the same.
    "chaos/test_certificate.py::test_of_a_split_model_too_a_replay_agrees_after_a_kill_and_not_after_a_flip",
    "chaos/test_ddp.py::test_a_rank_that_dies_before_the_group_is_made_does_not_hold_the_others[ulfm-1]",
    "chaos/test_seats.py::test_a_newcomer_that_dies_before_it_registers_is_replaced",
    "chaos/test_seats.py::test_spares_of_a_session_have_no_rank_in_a_group[session-first]",
    "chaos/test_ddp.py::test_whoever_a_completed_collective_fails_at_has_its_result_too[gloo]",
    "chaos/test_full_disk.py::test_a_worker_dies_while_the_temporary_directory_is_full[gloo-False]",
    "chaos/test_guard.py::test_healing_gives_the_bits_of_the_undisturbed_run_and_names_who_was_at_fault[ulfm-3-optimizer]",
    "chaos/test_guard.py::test_warning_names_the_worker_and_goes_on_with_other_bits",
    "chaos/test_hangs.py::test_without_a_timeout_nobody_is_ended_and_the_job_is_started_again",
    "chaos/test_nodes.py::test_a_node_that_loses_only_its_way_to_the_store_is_done_without_and_stops_nobody_else",
    "chaos/test_nodes.py::test_with_etcd_a_job_whose_launchers_all_died_begins_anew",
    "chaos/test_nodes.py::test_with_etcd_what_a_launcher_was_started_with_that_is_gone_does_not_bind_the_next",
    "chaos/test_partial.py::test_a_part_that_was_saved_before_is_as_old_as_the_report_says[sharded-words0]",
    "chaos/test_pipeline.py::test_who_dies_while_it_sends_its_copy_comes_back_as_it_was_sent_whole_before",
    "chaos/test_pipeline.py::test_workers_that_are_told_to_leave_do_so_one_after_the_other[gloo]",
    "chaos/test_reinit.py::test_a_split_model_is_built_again_by_those_left_and_goes_on_from_the_checkpoint[pipeline]",
    "chaos/test_sharded.py::test_without_a_checkpoint_the_job_begins_again[ulfm]",
    "chaos/test_features.py::test_what_differs_where_a_script_is_not_seeded_is_that_of_the_lowest_worker[sharded]",
    "chaos/test_p2p.py::test_a_death_outside_a_group_ends_the_waiting_inside_it[ulfm]",
    "chaos/test_p2p.py::test_who_waits_for_a_killed_sender_goes_on_and_no_old_message_is_taken_for_a_new_one[ulfm]",
    "chaos/test_start.py::test_a_worker_that_is_stopped_before_it_imports_anything_is_ended_and_done_without[ulfm]",
    "lab/test_soft_group.py::test_a_trial_that_fails_twice_is_a_training_that_failed",
    # What a neighbour shows with other parameters, and takes seconds of processor time.
    "chaos/test_launcher.py::test_a_worker_that_ends_too_early_ends_the_job[os_exit",
    "chaos/test_checkpoint_crash.py::test_killed_at_any_moment_nothing_that_was_complete_is_lost[3]",
    "chaos/test_streams.py::test_workers_that_would_train_on_different_data_end_with_one_line[split-line0]",
    "contract/test_stores.py::test_who_is_cut_off_knows_it_before_others_see_its_lease_run_out_and_leases_of_others_are_kept[hubs]",
    "gpu/test_one_gpu.py::test_a_section_holds[exporter-cpu]",
    # The models: the largest spaces, where a smaller one, or another strategy in the same space, stays.
    "model/test_protocol_explored.py::test_every_line_of_the_protocol_is_needed[WithoutConfirming-strategy5-",
    # Next to come back, when others have made room.
    "lab/cli/test_logs.py::test_a_plan_takes_a_log_and_says_what_it_was_taken_for",
    "chaos/test_features.py::test_a_training_that_has_everything_ends_with_the_same_bits[ulfm]",
    "chaos/test_features.py::test_a_worker_that_dies_in_an_evaluation_changes_nothing[ulfm]",
    "chaos/test_launcher_death.py::test_nothing_is_left_where_what_would_end_it_is_stopped_when_the_launcher_dies[ulfm-all watchers]",
    "chaos/test_pipeline.py::test_who_is_stuck_is_found_and_not_those_who_wait_for_it_inside_the_step[ulfm]",
    "lab/test_campaign.py::test_a_trial_that_kills_its_process_twice_has_failed_and_the_others_are_made",
    "lab/test_soft_group.py::test_a_group_that_lost_a_process_is_made_anew_and_the_trial_is_the_same",
    "chaos/test_backward_overlap.py::test_a_worker_that_dies_in_what_it_has_begun_changes_no_bit[between]",
    "chaos/test_dashboard.py::test_a_launcher_that_dies_and_comes_back_has_the_same_address_and_token",
    "chaos/test_ddp.py::test_all_survivors_raise_at_the_same_calls_whenever_ranks_die[gloo]",
    "chaos/test_ddp_devices.py::test_a_killed_rank_gives_the_bits_of_host_memory[gloo]",
    "chaos/test_ddp_ordered.py::test_the_bits_are_those_of_adding_rank_by_rank_whoever_comes_late[4]",
    "chaos/test_devices.py::test_killed_workers_change_no_bit_where_copies_lag",
    "chaos/test_devices.py::test_with_real_workers_a_model_stays_on_its_device_when_one_dies_and_when_one_joins[replicated]",
    "chaos/test_net_faults.py::test_of_a_node_whose_power_fails_nothing_is_left_and_the_others_know_what_was_injected",
    "chaos/test_nodes.py::test_launchers_hear_everything_and_a_lost_one_ends_only_its_own_workers",
    "chaos/test_phases.py::test_a_worker_that_freezes_in_a_phase_is_ended_within_its_limit[GATE-sleep-gloo]",
    "chaos/test_rejoin.py::test_new_workers_replace_all_that_the_job_began_with_though_a_giver_and_a_newcomer_die_in_between",
    "chaos/test_schedulers.py::test_the_report_of_a_module_says_how_to_run_it_again",
    "chaos/test_seats.py::test_a_script_that_does_not_register_goes_on_without_the_newcomer_which_says_why",
    "chaos/test_sick_devices.py::test_a_computation_that_never_ends",
    "contract/test_communicator.py::test_all_pass_where_groups_were_given_up_or_the_store_goes_in_the_moment_of_an_agreement",
    # By processor time: a neighbour, a contract test or the frameworks' own environment shows the same.
    "chaos/test_hangs.py::test_a_rank_that_sleeps_between_two_collectives",
    "chaos/test_hangs.py::test_a_message_that_was_begun_early_is_waited_for_once_the_script_waits",
    "chaos/test_foreign_launchers.py::test_tasks_of_srun_continue_when_one_dies_also_the_one_that_led_the_store",
    "chaos/test_ddp_ordered.py::test_a_death_in_a_backward_pass_that_autograd_runs_in_a_thread_of_its_own",
    "chaos/test_foreign_launchers.py::test_torchrun_restarts_all_when_one_is_killed_and_no_bit_changes",
    "chaos/test_fork_server.py::test_a_worker_imports_torch_itself_where_its_script_sets_torch_up",
    "chaos/test_launcher.py::test_without_the_watcher_the_end_of_a_worker_is_not_seen",
    "chaos/test_model_kinds.py::test_under_a_bare_mpirun_a_worker_that_raises_ends_the_job",
    "chaos/test_p2p.py::test_what_a_stopped_sender_writes_when_it_wakes_reaches_nobody",
    "chaos/test_pipeline.py::test_a_stage_that_is_lost_with_its_mirror_takes_all_back_and_the_run_says_so[gloo-True-3]",
    "lab/test_campaign_killed.py::test_nobody_goes_on_with_a_trial_when_the_leader_is_killed",
    "lab/test_soft_group.py::test_altering_the_state_in_memory_is_altering_the_file_of_the_process[model]",
    "chaos/test_nodes.py::test_a_node_without_power_is_found_by_its_lease_and_comes_back_with_newcomers",
    "chaos/test_seats.py::test_spares_of_a_session_have_no_rank_in_a_group[gloo]",
    "chaos/test_shared_memory_late.py::test_with_the_memory_used_again_all_survivors_would_be_wrong_alike",
    "chaos/test_fork_server.py::test_a_job_goes_on_without_its_fork_server[while-it-imports]",
    "integrations/test_backend_frameworks.py::test_survivors_finish_with_equal_weights[ddp_loop]",
    "integrations/test_backend_frameworks.py::test_over_plain_gloo_a_death_ends_every_rank",
    "integrations/test_backend_frameworks.py::test_without_filling_no_rank_finishes",
    "lab/test_soft_group.py::test_trials_from_a_warm_state_find_what_trainings_in_processes_of_their_own_find",
    "lab/test_soft_group.py::test_stages_of_a_pipeline_have_their_own_layers_and_one_is_altered_alone",
    "model/test_ddp_explored.py::test_every_line_is_needed_here_too[FailsWhereItWasCalled-",
    "model/test_ddp_explored.py::test_a_collective_that_is_made_again_does_not_need_the_confirmation",
    "model/test_protocol_explored.py::test_every_line_of_the_protocol_is_needed[LoadsInSilence-",
    "model/test_protocol_explored.py::test_every_line_of_the_protocol_is_needed[WithoutConfirming-strategy4-",
    "model/test_protocol_explored.py::test_restart_alone_does_not_need_the_confirmation_because_loading_is_said_first",
    "model/test_split_explored.py::test_one_restores_a_lost_part_and_gives_it_to_the_others",
)
"""Beginnings of their names, below ``tests/``."""


LONGEST_FIRST = (
    "chaos",
    "gpu",
    "contract",
    "torch_suite",
    "cli",
    "lab/cli",
    "property",
    "model",
    "integrations",
    "browser",
    "loggers",
    "lab",
    "attacks",
    "golden",
    "unit",
)
"""Folders below ``tests/`` in the order in which they run: files that start many jobs come first, so that no process of
pytest is left with one of them while the others have nothing to do."""


def pytest_addoption(parser):
    parser.addoption(
        "--draw",
        type=int,
        metavar="SEED",
        help="also run a twentieth of the tests that are marked soak, drawn with this seed; those of hours excepted",
    )
    parser.addoption(
        "--cold-start",
        action="store_true",
        help="each job imports torch, as in the product: see tests/support/warm.py",
    )
    parser.addoption(
        "--processor-times",
        metavar="FILE",
        help="append a line per test: seconds of processor time, its ended processes included, a tab, its name",
    )


def pytest_report_header(config):
    if (seed := config.getoption("--draw")) is not None:
        return f"a twentieth of the long tests runs too, drawn with seed {seed}; once more: make test SEED={seed}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """On a busy machine, the time by the clock says little about the cost of a test."""
    before_s = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        if name := item.config.getoption("--processor-times"):
            with Path(name).open("a") as file:
                file.write(f"{sum(os.times()[:4]) - before_s:.2f}\t{item.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Say now and then how long the tests will take; the processes of pytest-xdist have no terminal."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimeLeftLines(reporter), "holdfast-time-left")


def pytest_collection_finish():
    """Leave what was collected, and torch, out of later garbage collections: a sixth of the time of tests that compute much."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def warm_start(pytestconfig):
    """Jobs start from a process that has imported torch: see there."""
    warm = WarmStart()
    if not pytestconfig.getoption("--cold-start"):
        warm.install()
    yield warm
    warm.close()


@pytest.fixture(autouse=True)
def _cold_start(request, warm_start):
    """The jobs of tests with this mark start from nothing."""
    warm_start.is_on = request.node.get_closest_marker("cold_start") is None


@pytest.fixture(autouse=True, scope="session")
def _notes_of_runs_stay_here(tmp_path_factory):
    """Jobs of tests note that they were run; not in the home of who tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _no_session_outlives_a_test(monkeypatch):
    if (session := sys.modules.get("holdfast.session.session")) is not None:  # importing torch takes seconds
        monkeypatch.setattr(session, "_sessions", [])


@pytest.fixture(autouse=True)
def _no_exception_hook_outlives_a_test():
    """One of a worker that outlives its test would end the process of pytest at the next exception that is shown."""
    hook = sys.excepthook
    yield
    left, sys.excepthook = sys.excepthook, hook
    module = getattr(left, "__module__", "")
    assert not module.startswith("holdfast"), f"the test leaves {left} of {module} in sys.excepthook"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONGEST_FIRST.index(item.path.parent.relative_to(Path(__file__).parent).as_posix()))
    by_file = defaultdict(list)
    for long in LONG:
        by_file[long.partition("::")[0]].append(long)
    found = set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if matching := [long for long in by_file[name.partition("::")[0]] if name.startswith(long)]:
            found.update(matching)
            item.add_marker(pytest.mark.soak)
    if is_whole_suite(config) and (stale := set(LONG) - found):
        msg = f"tests/conftest.py names tests that there are not: {sorted(stale)}"
        raise pytest.UsageError(msg)
    if (seed := config.getoption("--draw")) is not None:
        run_too(config, draw(items, seed))
