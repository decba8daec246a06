//! Pools of persistent memory and the BTT volumes in them.
