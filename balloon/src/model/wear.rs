//! Lifetime of persistent memory, computed by the equations in section 4.4 of the Memorage paper.
//!
//! Storage and memory wear at different rates, because memory is written much more and storage is
//! much larger. If storage lends capacity to memory, memory wears less and storage wears more.

use serde::Serialize;

/// Ratios between memory and storage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Ratios {
    /// a: storage capacity divided by memory capacity.
    pub capacity: f64,
    /// b: write bandwidth to memory divided by write bandwidth to storage.
    pub bandwidth: f64,
    /// g: endurance of memory cells divided by endurance of storage cells.
    pub endurance: f64,
}

impl Ratios {
    /// Equation 1: factor by which the memory's lifetime changes if its writes are spread evenly
    /// over memory and storage.
    pub(crate) fn pooled_lifetime(&self) -> f64 {
        (1.0 + self.capacity / self.endurance) * self.bandwidth / (1.0 + self.bandwidth)
    }
}

/// Memory that has a share of its data on borrowed storage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Lending {
    /// h: the share, from 0 to 1.
    pub share: f64,
    /// b: write bandwidth to memory divided by write bandwidth to storage.
    pub bandwidth: f64,
    /// Cm: capacity of memory.
    pub memory_bytes: f64,
    /// Bs: bytes that users of storage write per day.
    pub storage_bytes_per_day: f64,
    /// tau: number of days between two exchanges of the borrowed capacity. Each exchange writes
    /// that capacity twice.
    pub exchange_days: f64,
}

impl Lending {
    /// Equation 2, left: factor by which the memory's lifetime changes.
    pub(crate) fn memory_lifetime(&self) -> f64 {
        1.0 / (1.0 - self.share)
    }

    /// Equation 2, right: factor by which the storage's wear changes.
    pub(crate) fn storage_wear(&self) -> f64 {
        let exchanged = 2.0 * self.share * self.memory_bytes;
        1.0 + self.bandwidth * self.share
            + exchanged / (self.exchange_days * self.storage_bytes_per_day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = (1u64 << 30) as f64;

    /// Setting of the paper: 8 GB of memory whose cells last ten times as long as storage cells.
    fn paper(storage_gib: f64, bandwidth: f64) -> f64 {
        Ratios { capacity: storage_gib / 8.0, bandwidth, endurance: 10.0 }.pooled_lifetime()
    }

    /// Value in tenths. The value is rounded down, because the paper has 6.9 for 6.96.
    fn tenths(value: f64) -> u64 {
        (value * 10.0) as u64
    }

    #[test]
    fn equation_1_with_240_gb_of_storage_is_3_9_times() {
        assert_eq!(tenths(paper(240.0, 100.0)), 39);
        assert!((paper(240.0, 1e12) - 4.0).abs() < 1e-6, "the limit for large b");
    }

    #[test]
    fn equation_1_with_480_gb_of_storage_is_6_9_times() {
        assert_eq!(tenths(paper(480.0, 100.0)), 69);
        assert!((paper(480.0, 1e12) - 7.0).abs() < 1e-6, "the limit for large b");
    }

    #[test]
    fn equation_1_with_equal_bandwidths_is_2_and_3_5_times() {
        assert!((paper(240.0, 1.0) - 2.0).abs() < 1e-9);
        assert!((paper(480.0, 1.0) - 3.5).abs() < 1e-9);
        assert!(paper(240.0, 0.1) < 1.0, "memory that helps out a busy storage wears faster");
    }

    fn lending(share: f64) -> Lending {
        Lending {
            share,
            bandwidth: 4.0,
            memory_bytes: 8.0 * GIB,
            storage_bytes_per_day: 80.0 * GIB,
            exchange_days: 1.0,
        }
    }

    #[test]
    fn equation_2_memory_lasts_longer_by_borrowed_share() {
        assert_eq!(lending(0.0).memory_lifetime(), 1.0);
        assert_eq!(lending(0.5).memory_lifetime(), 2.0);
        assert!((lending(0.2).memory_lifetime() - 1.25).abs() < 1e-12);
    }

    #[test]
    fn equation_2_storage_wears_by_writes_and_by_exchanges() {
        assert_eq!(lending(0.0).storage_wear(), 1.0);
        // The factor b h is 2. The exchanges write 2 h Cm = 8 GB per day, a tenth of the other
        // writes.
        assert!((lending(0.5).storage_wear() - 3.1).abs() < 1e-12);
        let seldom = Lending { exchange_days: 10.0, ..lending(0.5) };
        assert!((seldom.storage_wear() - 3.01).abs() < 1e-12);
    }

    #[test]
    fn equation_2_gives_values_of_figure_11() {
        // 8 GB of memory, 12 GB written per day, and b = 720. With h = 0.5, the memory lasts twice
        // as long. If the capacity is exchanged a thousand times a day, storage wears a thousand
        // times as fast.
        let figure = |share, exchange_days| Lending {
            share,
            bandwidth: 720.0,
            storage_bytes_per_day: 12.0 * GIB,
            exchange_days,
            ..lending(share)
        };
        assert_eq!(figure(0.5, 0.001).memory_lifetime(), 2.0);
        assert!((1_000.0..1_100.0).contains(&figure(0.5, 0.001).storage_wear()));
        let [seldom, often] = [1.0, 0.01].map(|days| figure(0.5, days).storage_wear() - 361.0);
        assert!(
            often > 10.0 * seldom,
            "more than an order of magnitude between tau = 1 and tau = 0.01"
        );
    }
}
