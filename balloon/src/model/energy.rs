//! Energy that memory consumes.
//!
//! There are two models: one of memory technologies (PRAM paper, Table 2), and one of memory states
//! (AMF paper, section 6). Their results cannot be compared. The first model has an idle power for
//! each technology, and the second has a single technology.

/// Size of a "GB" in the papers. They do not define it, so it is taken to be that of a "1 GB"
/// module.
const GIB: f64 = (1u64 << 30) as f64;
const BITS_PER_BYTE: f64 = 8.0;
const JOULES_PER_NANOJOULE: f64 = 1e-9;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Technology {
    /// Time from a read request until the data is available.
    pub read_ns: u64,
    /// Time from a write request until the data is stored.
    pub write_ns: u64,
    /// Energy to read one bit.
    pub read_nj_per_bit: f64,
    /// Energy to write one bit.
    pub write_nj_per_bit: f64,
    /// Power to retain one GiB.
    pub idle_w_per_gib: f64,
}

/// DRAM, from Table 2 of the PRAM paper.
pub(crate) const DRAM: Technology = Technology {
    read_ns: 50,
    write_ns: 50,
    read_nj_per_bit: 0.1,
    write_nj_per_bit: 0.1,
    idle_w_per_gib: 1.0,
};

/// PRAM, from Table 2 of the PRAM paper.
pub(crate) const PRAM: Technology = Technology {
    read_ns: 50,
    write_ns: 1_000,
    read_nj_per_bit: 0.05,
    write_nj_per_bit: 0.5,
    idle_w_per_gib: 0.005,
};

impl Technology {
    /// Joules to retain memory contents.
    pub(crate) fn idle_joules(&self, byte_seconds: f64) -> f64 {
        self.idle_w_per_gib * byte_seconds / GIB
    }

    /// Joules for reading and writing memory.
    pub(crate) fn access_joules(&self, read_bytes: f64, written_bytes: f64) -> f64 {
        let nanojoules = self.read_nj_per_bit * read_bytes + self.write_nj_per_bit * written_bytes;
        nanojoules * BITS_PER_BYTE * JOULES_PER_NANOJOULE
    }

    /// Additional time per access compared with `other`, if `write_permille` of all accesses are
    /// writes.
    pub(crate) fn slower_ns(&self, other: &Technology, write_permille: u64) -> u64 {
        let mean = |technology: &Technology| {
            technology.write_ns * write_permille
                + technology.read_ns * (1000 - write_permille.min(1000))
        };
        mean(self).saturating_sub(mean(other)) / 1000
    }
}

/// Power of memory in each of its states (AMF paper, section 6).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct States {
    /// Power of one unused GB.
    pub idle_w_per_gib: f64,
    /// Power of one GB in use.
    pub active_w_per_gib: f64,
    /// Power of one GB during its transition to active.
    pub transition_w_per_gib: f64,
    /// Duration of a transition. The paper has no value for it. A section is onlined and first used
    /// within about a second.
    pub transition_s: f64,
}

/// Values from section 6.2 of the AMF paper, which are based on data by Micron.
pub(crate) const AMF: States = States {
    idle_w_per_gib: 0.23,
    active_w_per_gib: 1.34,
    transition_w_per_gib: 0.76,
    transition_s: 1.0,
};

impl States {
    /// Joules of memory with these active and idle times. `activated_bytes` is the amount that
    /// became active.
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
        // A gigabit is 125,000,000 bytes, so its energy in joules has the same value as the energy
        // of one bit in nanojoules.
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
    fn pram_is_slower_only_for_writes() {
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
    fn amf_saves_energy_of_idle_memory() {
        // One day of 64 GB of memory that are used for a quarter of the day, added once and
        // returned once.
        let always = AMF.joules(64.0 * GIB * DAY_S, 0.0, 0.0);
        let lazily = AMF.joules(16.0 * GIB * DAY_S, 48.0 * GIB * DAY_S, 64.0 * GIB);
        about(always, 64.0 * 1.34 * DAY_S);
        assert!(lazily < always * 0.4, "{lazily} of {always}");
        // A transition costs less than 0.7 s of active memory. Only a resize every second would
        // therefore cancel the saving.
        let restless = AMF.joules(16.0 * GIB * DAY_S, 48.0 * GIB * DAY_S, 64.0 * GIB * DAY_S);
        assert!(restless > lazily * 1.5);
    }
}
