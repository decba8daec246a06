//! State and decisions of the governor, read from the API.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::Guest;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn pressure(guest: &Guest) -> Result<Value> {
    guest.get("vm.pressure?decisions=1000")
}

/// Returns the decisions that the VMM has retained, newest first.
pub(crate) fn decisions(guest: &Guest) -> Result<Vec<Value>> {
    let info = pressure(guest)?;
    Ok(info["decisions"]
        .as_array()
        .with_context(|| format!("vm.pressure has no decisions: {info}"))?
        .clone())
}

pub(crate) fn decisions_total(guest: &Guest) -> Result<u64> {
    pressure(guest)?["decisions_total"].as_u64().context("vm.pressure has no decisions_total")
}

/// Returns all decisions after the first `total` ones.
pub(crate) fn decisions_since(guest: &Guest, total: u64) -> Result<Vec<Value>> {
    let mut decisions = decisions(guest)?;
    decisions.retain(|decision| decision["seq"].as_u64() > Some(total));
    Ok(decisions)
}

pub(crate) fn has_decided(guest: &Guest, is_it: impl Fn(&Value) -> bool) -> Result<bool> {
    Ok(decisions(guest)?.iter().any(is_it))
}

/// Waits until the VMM reports the agent as `live`, `silent` or `gone`, as given by `state`.
pub(crate) fn wait_for_agent(guest: &Guest, state: &str) -> Result<()> {
    guest.wait_until(&format!("the agent is {state}"), LIMIT, || {
        Ok(guest.get("vm.pressure")?["agent"] == state)
    })?;
    let shown = guest.metric("foreshore_pressure_agent_state", &[("state", state)])?;
    ensure!(shown == 1.0, "The metrics do not report that the agent is {state}");
    Ok(())
}
