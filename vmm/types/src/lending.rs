//! Division of a pool's free space between volumes and memory. The pool and the simulator share it.

use crate::UNIT_BYTES;

/// Promised bytes of thin volumes that may be lent as memory. This setting is not on the media,
/// because no memory stays lent after a crash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loan {
    /// Promised bytes that memory may borrow.
    pub borrowable_bytes: u64,
    /// Bytes that stay free for the next writes. `None` if nothing may be borrowed.
    pub min_free_bytes: Option<u64>,
}

impl Loan {
    /// Returns the part of `available_bytes` that is withheld from memory: the unallocated part of
    /// the reserve, or of the promised bytes without those that memory may borrow, whichever is
    /// larger.
    pub fn withheld_bytes(
        self,
        available_bytes: u64,
        reserve_bytes: u64,
        promised_bytes: u64,
    ) -> u64 {
        let kept_bytes = match self.min_free_bytes {
            Some(min_free_bytes) => promised_bytes
                .saturating_sub(self.borrowable_bytes)
                .max(min_free_bytes.next_multiple_of(UNIT_BYTES).min(promised_bytes)),
            None => promised_bytes,
        };
        kept_bytes.max(reserve_bytes).min(available_bytes)
    }

    /// Returns the lent bytes that must be returned: `awaited_bytes` for writes that wait, or
    /// enough to keep the minimum of free bytes, whichever is larger.
    pub fn shortage_bytes(
        self,
        available_bytes: u64,
        promised_bytes: u64,
        awaited_bytes: u64,
        lent_bytes: u64,
    ) -> u64 {
        let kept_bytes = self.min_free_bytes.unwrap_or(0).min(promised_bytes);
        let kept_bytes = kept_bytes.next_multiple_of(UNIT_BYTES).max(awaited_bytes);
        kept_bytes.saturating_sub(available_bytes).min(lent_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn borrowing_leaves_the_minimum_and_the_reserve() {
        let withheld = |borrowable, min_free: Option<u64>, reserve, promised| {
            let min_free_bytes = min_free.map(|mib| mib * MIB);
            let loan = Loan { borrowable_bytes: borrowable * MIB, min_free_bytes };
            loan.withheld_bytes(800 * MIB, reserve * MIB, promised * MIB) / MIB
        };
        assert_eq!(withheld(200, None, 0, 500), 500, "nothing may be borrowed");
        assert_eq!(withheld(0, Some(32), 0, 500), 500);
        assert_eq!(withheld(200, Some(32), 0, 500), 300);
        assert_eq!(withheld(490, Some(31), 0, 500), 32, "whole chunks");
        assert_eq!(withheld(900, Some(32), 0, 4), 4, "no more than volumes need");
        assert_eq!(withheld(300, Some(32), 400, 500), 400, "the reserve is never lent");
        assert_eq!(withheld(0, Some(32), 0, 900), 800, "no more than is available");
    }

    #[test]
    fn shortage_is_what_writes_await_or_the_minimum_lacks() {
        let shortage = |min_free: Option<u64>, available, promised, awaited, lent| {
            let min_free_bytes = min_free.map(|mib| mib * MIB);
            let loan = Loan { borrowable_bytes: 0, min_free_bytes };
            let [available, promised, awaited, lent] =
                [available, promised, awaited, lent].map(|mib: u64| mib * MIB);
            loan.shortage_bytes(available, promised, awaited, lent) / MIB
        };
        assert_eq!(shortage(Some(32), 10, 500, 0, 100), 22);
        assert_eq!(shortage(Some(31), 10, 500, 0, 100), 22, "whole chunks");
        assert_eq!(shortage(Some(32), 10, 20, 0, 100), 10, "no more than volumes need");
        assert_eq!(shortage(Some(32), 10, 500, 64, 100), 54, "waiting writes");
        assert_eq!(shortage(Some(32), 10, 500, 64, 8), 8, "no more than is lent");
        assert_eq!(shortage(None, 0, 500, 0, 100), 0);
        assert_eq!(shortage(Some(32), 40, 500, 0, 100), 0);
    }
}
