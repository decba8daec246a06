//! Costs of memory other than time: energy and wear, by models of the papers.
//! docs/reference/simulator.md lists the source of each value.

pub(crate) mod energy;
pub(crate) mod wear;
