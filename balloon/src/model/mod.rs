//! Costs of memory other than time, which are energy and wear, computed by models from the papers.
//! docs/reference/simulator.md lists the source of each value.

pub(crate) mod energy;
pub(crate) mod wear;
