//! Free PM that the agent requires before it enables demotion.

/// PM counts as full if less than its size divided by this number is free.
const FULL_PART: u64 = 32;
const MAX_FULL_PAGES: u64 = (64 << 20) / 4096;

/// Number of free pages below which `pm_pages` of PM count as full. The agent then disables
/// demotion of pages to PM (docs/reference/agent.md).
pub fn full_pm_pages(pm_pages: u64) -> u64 {
    (pm_pages / FULL_PART).min(MAX_FULL_PAGES)
}
