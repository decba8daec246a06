//! What memory costs beside time: energy and wear, by the papers' models.
//! docs/reference/simulator.md says where each figure is from.

pub(crate) mod energy;
pub(crate) mod wear;
