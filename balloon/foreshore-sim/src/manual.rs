//! Shell completion and the manual page.

use std::path::Path;

use anyhow::Context;
use balloon::controller::Rules;
use balloon::params::Param;
use balloon::policy::Policy;
use balloon::sim::{Workload, WorkloadParams};
use clap::{Command, CommandFactory};
use foreshore_cli::{
    FlagOption, GivenOptions, Manual, Shell, Values, complete_options, completion_script,
};

use super::args::{Arguments, EXIT_STATUS};

const PROGRAM: &str = "foreshore-sim";

pub(crate) fn completion(shell: Shell) -> anyhow::Result<Vec<u8>> {
    completion_script(shell, PROGRAM, PROGRAM).context("cannot create the script")
}

/// Returns the manual page, or writes the pages to a folder.
pub(crate) fn page(folder: Option<&Path>) -> anyhow::Result<Vec<u8>> {
    let manual = Manual::new(Arguments::command(), EXIT_STATUS);
    Ok(manual.page_or_write(folder)?.into_bytes())
}

/// Description of the command line, with completion of policies, workloads and their parameters.
pub(crate) fn description() -> Command {
    Arguments::command().mut_args(|arg| match arg.get_id().as_str() {
        "policy" => arg.add(complete_options(policies)),
        "workload" => arg.add(complete_options(workloads)),
        _ => arg,
    })
}

/// Policies, followed by the parameters of the given policy and of the rules for every policy.
fn policies(given: &GivenOptions) -> Vec<FlagOption> {
    let policy = given.first().and_then(Policy::from_name);
    let params = policy.iter().flat_map(Policy::table).chain(Rules::TABLE);
    with_params(Policy::NAMES, params)
}

fn workloads(_: &GivenOptions) -> Vec<FlagOption> {
    with_params(Workload::ALL.map(Workload::name), WorkloadParams::TABLE)
}

fn with_params<'a>(
    names: impl IntoIterator<Item = &'static str>,
    params: impl IntoIterator<Item = &'a Param>,
) -> Vec<FlagOption> {
    let params = params.into_iter().map(|param| FlagOption::new(param.name, Values::Unlisted));
    std::iter::once(FlagOption::without_key(Values::words(names))).chain(params).collect()
}
