//! Energy that memory takes.
//!
//! Two models: of the technologies (PRAM support in Linux, Table 2) and of the states that memory
//! is in (AMF, section 6). Their figures cannot be compared with each other: the first has memory
//! that is idle cost as much as its technology takes to keep it, the second knows one technology.

/// What the papers call GB: they do not say which, and this is what a module of "1 GB" holds.
const GIB: f64 = (1u64 << 30) as f64;
const BITS_PER_BYTE: f64 = 8.0;
const JOULES_PER_NANOJOULE: f64 = 1e-9;

/// A memory technology.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Technology {
    /// From the request until the data is there.
    pub read_ns: u64,
    /// From the request until the data is stored.
    pub write_ns: u64,
    /// For a bit that is read.
    pub read_nj_per_bit: f64,
    /// For a bit that is written.
    pub write_nj_per_bit: f64,
    /// To keep a GiB.
    pub idle_w_per_gib: f64,
}

/// 002, Table 2.
pub(crate) const DRAM: Technology = Technology {
    read_ns: 50,
    write_ns: 50,
    read_nj_per_bit: 0.1,
    write_nj_per_bit: 0.1,
    idle_w_per_gib: 1.0,
};

/// 002, Table 2.
pub(crate) const PRAM: Technology = Technology {
    read_ns: 50,
    write_ns: 1_000,
    read_nj_per_bit: 0.05,
    write_nj_per_bit: 0.5,
    idle_w_per_gib: 0.005,
};

impl Technology {
    /// Joules to keep so much for so long.
    pub(crate) fn idle_joules(&self, byte_seconds: f64) -> f64 {
        self.idle_w_per_gib * byte_seconds / GIB
    }

    /// Joules to read and to write so much.
    pub(crate) fn access_joules(&self, read_bytes: f64, written_bytes: f64) -> f64 {
        let nanojoules = self.read_nj_per_bit * read_bytes + self.write_nj_per_bit * written_bytes;
        nanojoules * BITS_PER_BYTE * JOULES_PER_NANOJOULE
    }

    /// How much longer than in `other` an access takes, if so many thousandths of all are writes.
    pub(crate) fn slower_ns(&self, other: &Technology, write_permille: u64) -> u64 {
        let mean = |technology: &Technology| {
            technology.write_ns * write_permille
                + technology.read_ns * (1000 - write_permille.min(1000))
        };
        mean(self).saturating_sub(mean(other)) / 1000
    }
}

/// Memory by the state that it is in, AMF's section 6.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct States {
    /// A gigabyte that nobody uses.
    pub idle_w_per_gib: f64,
    /// A gigabyte in use.
    pub active_w_per_gib: f64,
    /// A gigabyte that becomes active, while it does.
    pub transition_w_per_gib: f64,
    /// For how long it does. The paper does not say; a second is of the order of onlining a
    /// section and using it.
    pub transition_s: f64,
}

/// 004, section 6.2, after Micron.
pub(crate) const AMF: States = States {
    idle_w_per_gib: 0.23,
    active_w_per_gib: 1.34,
    transition_w_per_gib: 0.76,
    transition_s: 1.0,
};

impl States {
    /// Joules of memory that was so much active and so much idle, and of which so much became
    /// active.
    pub(crate) fn joules(
        &self,
        active_byte_seconds: f64,
        idle_byte_seconds: f64,
        activated_bytes: f64,
    ) -> f64 {
        let transition = self.transition_w_per_gib * self.transition_s * activated_bytes;
        (self.active_w_per_gib * active_byte_seconds
            + self.idle_w_per_gib * idle_byte_seconds
            + transition)
            / GIB
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_S: f64 = 86_400.0;

    fn about(value: f64, expected: f64) {
        assert!((value - expected).abs() <= expected.abs() * 1e-9, "{value} is not {expected}");
    }

    #[test]
    fn pram_table_latencies() {
        assert_eq!((DRAM.read_ns, DRAM.write_ns), (50, 50));
        assert_eq!((PRAM.read_ns, PRAM.write_ns), (50, 1_000));
    }

    #[test]
    fn pram_table_access_energy() {
        // A gigabit is 125,000,000 bytes; so many nJ/bit are so many joules for it.
        let gigabit = 125e6;
        about(DRAM.access_joules(gigabit, 0.0), 0.1);
        about(DRAM.access_joules(0.0, gigabit), 0.1);
        about(PRAM.access_joules(gigabit, 0.0), 0.05);
        about(PRAM.access_joules(0.0, gigabit), 0.5);
        about(PRAM.access_joules(gigabit, gigabit), 0.55);
    }

    #[test]
    fn pram_table_idle_power() {
        about(DRAM.idle_joules(GIB * DAY_S), 86_400.0);
        about(PRAM.idle_joules(GIB * DAY_S), 432.0);
    }

    #[test]
    fn pram_is_slower_by_its_writes_alone() {
        assert_eq!(PRAM.slower_ns(&DRAM, 0), 0);
        assert_eq!(PRAM.slower_ns(&DRAM, 500), 475);
        assert_eq!(PRAM.slower_ns(&DRAM, 1000), 950);
        assert_eq!(DRAM.slower_ns(&PRAM, 1000), 0);
    }

    #[test]
    fn amf_states() {
        about(AMF.joules(GIB, 0.0, 0.0), 1.34);
        about(AMF.joules(0.0, GIB, 0.0), 0.23);
        about(AMF.joules(0.0, 0.0, GIB), 0.76);
        about(AMF.joules(10.0 * GIB, 100.0 * GIB, 5.0 * GIB), 13.4 + 23.0 + 3.8);
    }

    #[test]
    fn amf_saves_by_what_it_leaves_idle() {
        // A day of 64 GB that are used for a quarter of it, integrated once and given back once.
        let always = AMF.joules(64.0 * GIB * DAY_S, 0.0, 0.0);
        let lazily = AMF.joules(16.0 * GIB * DAY_S, 48.0 * GIB * DAY_S, 64.0 * GIB);
        about(always, 64.0 * 1.34 * DAY_S);
        assert!(lazily < always * 0.4, "{lazily} of {always}");
        // Becoming active costs less than what 0.7 s of it take: only a resize every second would
        // eat the saving.
        let restless = AMF.joules(16.0 * GIB * DAY_S, 48.0 * GIB * DAY_S, 64.0 * GIB * DAY_S);
        assert!(restless > lazily * 1.5);
    }
}
