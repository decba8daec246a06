//! Free PM that the agent requires for demotion.

/// Divisor of PM. PM counts as full while less than the quotient is free.
const FULL_PART: u64 = 32;
const MAX_FULL_PAGES: u64 = (64 << 20) / 4096;

/// Free part of `pm_pages` below which PM counts as full. The agent then disables the demotion of
/// pages to PM (docs/reference/agent.md).
pub fn full_pm_pages(pm_pages: u64) -> u64 {
    (pm_pages / FULL_PART).min(MAX_FULL_PAGES)
}
