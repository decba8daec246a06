//! Shell completion and the manual page.

use std::path::Path;

use anyhow::Context;
use balloon::controller::Rules;
use balloon::params::Param;
use balloon::policy::Policy;
use balloon::sim::{Workload, WorkloadParams};
use clap::{Command, CommandFactory};
use foreshore_cli::{Manual, Shell, complete_options, completion_script};

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

fn policies() -> Vec<String> {
    let names = Policy::NAMES.map(str::to_owned);
    let tables = Policy::NAMES.into_iter().filter_map(Policy::from_name);
    let params = tables.flat_map(|policy| policy.table()).chain(Rules::TABLE);
    names.into_iter().chain(params.map(key)).collect()
}

fn workloads() -> Vec<String> {
    let names = Workload::ALL.into_iter().map(|workload| workload.name().to_owned());
    names.chain(WorkloadParams::TABLE.iter().map(key)).collect()
}

fn key(param: &Param) -> String {
    format!("{}=", param.name)
}
