//! `--pm-memory`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use foreshore_config::{ConfigError, name, section, size};
use foreshore_devices::file_id::is_same;
use foreshore_types::UNIT_BYTES;
use foreshore_types::size::Size;
use pmem_volume::pool::DEFAULT_SCRUB_BYTES_PER_S;

use super::super::numa::MAX_NODE;
use super::plug_bandwidth::{self, DEFAULT_PLUG_BANDWIDTH};

/// Lowest node number of a PM zone. Node 0 contains DRAM.
pub const MIN_PM_NODE: u32 = 1;

/// Largest latency in nanoseconds that the HMAT can hold in its unit.
const MAX_LATENCY_NS: u32 = 0xfffe;
/// The HMAT's unit of bandwidth is 10 MB/s.
const MIN_BANDWIDTH: u64 = 10 << 20;
const MAX_BANDWIDTH: u64 = MIN_BANDWIDTH * 0xfffe;

/// Values of one Optane DIMM: a random load, a store that bypasses the caches, and a sequential
/// read (Yang et al., "An Empirical Guide to the Behavior and Use of Scalable Persistent Memory",
/// FAST 2020).
const READ_LATENCY_NS: u32 = 305;
const WRITE_LATENCY_NS: u32 = 90;
const BANDWIDTH: u64 = 6600 << 20;

/// Default of `storage_min`. Writes of this size do not wait while the VMM begins to move memory.
const STORAGE_MIN_BYTES: u64 = 32 << 20;
/// Default of `storage_high`.
pub const STORAGE_HIGH_BYTES: u64 = 4 * STORAGE_MIN_BYTES;
/// Lowest limit on erasing: one chunk per second.
const MIN_SCRUB_BANDWIDTH: u64 = UNIT_BYTES;

section! {
    /// Zone of persistent memory.
    pub struct PmMemoryConfig: "--pm-memory"
        "Persistent memory that may be plugged as memory, in a node of its own" {
        pool: PathBuf => "Pool that lends the memory",
        size: u64 => "Upper limit of the plugged size",
        id: Option<String> => "Name of the zone, instead of pm, pm1 and so on",
        guest_numa_node (range (MIN_PM_NODE..=MAX_NODE)): Option<u32>
            => "Node in the guest, instead of the next free one",
        near (range (0..=MAX_NODE)): Option<u32>
            => "Node whose vCPUs the zone is local to, instead of the nearest",
        read_latency (syntax ("NS") range (1..=MAX_LATENCY_NS)): u32 = READ_LATENCY_NS
            => "Load latency from the near node in nanoseconds, as reported to the guest",
        write_latency (syntax ("NS") range (1..=MAX_LATENCY_NS)): u32 = WRITE_LATENCY_NS
            => "Store latency from the near node in nanoseconds, as reported to the guest",
        bandwidth (range (MIN_BANDWIDTH..=MAX_BANDWIDTH)): u64 = BANDWIDTH
            => "Bandwidth from the near node in bytes per second, as reported to the guest",
        scrub_bandwidth: u64 = DEFAULT_SCRUB_BYTES_PER_S.get()
            => "Upper limit of bytes per second erased after a return to the pool; 0 for no limit",
        storage_min: u64 = STORAGE_MIN_BYTES
            => "Free space for thin volumes below which the pool lends no memory",
        storage_low: u64 = 2 * STORAGE_MIN_BYTES
            => "Free space for thin volumes below which PM is unplugged",
        storage_high: u64 = STORAGE_HIGH_BYTES
            => "Free space for thin volumes at which the unplugging ends",
        spill: u64 = 0
            => "Space of thin volumes that is lent as memory, and DRAM or file space to which this memory is moved if volumes need it; 0 for none",
        spill_file: Option<PathBuf>
            => "Folder of an unnamed file to which memory is moved, instead of DRAM",
        plug_bandwidth: u64 = DEFAULT_PLUG_BANDWIDTH
            => "Upper limit of bytes per second plugged after an unplug; 0 for no limit",
    }
    strict true;
}

impl PmMemoryConfig {
    /// ID of the `nth` PM zone. Defaults are `pm`, `pm1`, `pm2` and so on.
    pub fn id_or_default(&self, nth: usize) -> String {
        let number = if nth == 0 { String::new() } else { nth.to_string() };
        self.id.clone().unwrap_or_else(|| format!("pm{number}"))
    }

    /// Limit on the rate of erasing; `None` if the configured value is 0 (unlimited).
    pub fn scrub_bytes_per_s(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.scrub_bandwidth)
    }

    fn check_spill(&self) -> Result<(), ConfigError> {
        if self.spill_file.is_some() && self.spill == 0 {
            let reason = "spill_file has no effect without spill".to_owned();
            return Err(ConfigError::Conflict { flag: Self::FLAG, reason });
        }
        if self.spill.is_multiple_of(UNIT_BYTES) && self.spill <= self.size {
            return Ok(());
        }
        Err(ConfigError::BadValue {
            flag: Self::FLAG,
            key: "spill".to_owned(),
            value: self.spill.to_string(),
            expected: format!(
                "a multiple of {} up to the size of the zone, {}",
                Size(UNIT_BYTES),
                Size(self.size)
            ),
        })
    }

    /// Checks the size, latencies, bandwidths, node number, spill and ID.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        size::check(flag, "size", self.size)?;
        self.id.as_ref().map_or(Ok(()), |id| name::check(flag, "id", id))?;
        if (1..MIN_SCRUB_BANDWIDTH).contains(&self.scrub_bandwidth) {
            return Err(ConfigError::BadValue {
                flag,
                key: "scrub_bandwidth".to_owned(),
                value: self.scrub_bandwidth.to_string(),
                expected: format!(
                    "0, for no bound, or at least {} per second",
                    Size(MIN_SCRUB_BANDWIDTH)
                ),
            });
        }
        plug_bandwidth::check(flag, Some(self.plug_bandwidth))?;
        self.check_spill()?;
        self.check_watermarks()?;
        self.check_ranges()
    }

    /// Returns true if the VM lends space of thin volumes as memory until they need it.
    pub fn lends_promised(&self) -> bool {
        self.spill > 0
    }

    fn check_watermarks(&self) -> Result<(), ConfigError> {
        let Self { storage_min: min, storage_low: low, storage_high: high, .. } = *self;
        size::check_most(Self::FLAG, "storage_high", high, size::MAX_BYTES, "")?;
        size::check_most(Self::FLAG, "storage_low", low, high, ", the value of storage_high")?;
        size::check_most(Self::FLAG, "storage_min", min, low, ", the value of storage_low")
    }
}

/// Checks each zone, and that all zones use the same pool, because the governor plans with the free
/// space of one pool.
pub(in crate::config) fn validate_all(zones: &[PmMemoryConfig]) -> Result<(), ConfigError> {
    zones.iter().try_for_each(PmMemoryConfig::validate)?;
    let Some((first, others)) = zones.split_first() else { return Ok(()) };
    let conflict = |reason| Err(ConfigError::Conflict { flag: PmMemoryConfig::FLAG, reason });
    if let Some(other) = others.iter().find(|other| !is_same(&other.pool, &first.pool)) {
        return conflict(format!(
            "zones of pool {:?} and of pool {:?}: all zones must use the same pool",
            first.pool, other.pool
        ));
    }
    type Value = fn(&PmMemoryConfig) -> u64;
    let of_pool: [(&str, Value); 4] = [
        ("scrub_bandwidth", |zone| zone.scrub_bandwidth),
        ("storage_min", |zone| zone.storage_min),
        ("storage_low", |zone| zone.storage_low),
        ("storage_high", |zone| zone.storage_high),
    ];
    for (key, value) in of_pool {
        if let Some(other) = others.iter().find(|other| value(other) != value(first)) {
            return conflict(format!(
                "{key} is {} in one zone and {} in another; it applies to the pool, and must be the same in all zones",
                Size(value(first)),
                Size(value(other))
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        PmMemoryConfig::parse(text).and_then(|pm| pm.validate()).unwrap_err().to_string()
    }

    #[test]
    fn flag_is_parsed() {
        let pm = PmMemoryConfig::parse("pool=/pm/pool,size=4G").unwrap();
        let expected = PmMemoryConfig {
            pool: "/pm/pool".into(),
            size: 4 << 30,
            id: None,
            guest_numa_node: None,
            near: None,
            read_latency: 305,
            write_latency: 90,
            bandwidth: 6600 << 20,
            scrub_bandwidth: 1 << 30,
            storage_min: 32 << 20,
            storage_low: 64 << 20,
            storage_high: 128 << 20,
            spill: 0,
            spill_file: None,
            plug_bandwidth: 1 << 30,
        };
        assert_eq!(pm, expected);
        assert!(pm.validate().is_ok());
        assert_eq!(
            pm,
            serde_json::from_str(r#"{"pool": "/pm/pool", "size": 4294967296}"#).unwrap()
        );
        let text = "pool=/p,size=2M,id=far,guest_numa_node=3,near=1,read_latency=400,write_latency=200,bandwidth=2G";
        let pm = PmMemoryConfig::parse(text).unwrap();
        assert!(pm.validate().is_ok());
        assert_eq!((pm.guest_numa_node, pm.near), (Some(3), Some(1)));
        assert_eq!((pm.read_latency, pm.write_latency, pm.bandwidth), (400, 200, 2 << 30));
        assert_eq!(
            (pm.id_or_default(0), pm.id_or_default(1)),
            ("far".to_owned(), "far".to_owned())
        );
    }

    #[test]
    fn zones_of_two_pools_are_refused() {
        let error = |texts: &[&str]| {
            let zones: Vec<_> =
                texts.iter().map(|text| PmMemoryConfig::parse(text).unwrap()).collect();
            validate_all(&zones).map_err(|error| error.to_string())
        };
        assert_eq!(error(&["pool=/p,size=2M", "pool=/p,size=4M"]), Ok(()));
        assert_eq!(
            error(&["pool=/p,size=2M", "pool=/q,size=4M"]).unwrap_err(),
            "--pm-memory: zones of pool \"/p\" and of pool \"/q\": all zones must use the same pool"
        );
        assert_eq!(
            error(&["pool=/p,size=2M", "pool=/p,size=4M,scrub_bandwidth=0"]).unwrap_err(),
            "--pm-memory: scrub_bandwidth is 1 GiB in one zone and 0 in another; it applies to the pool, and must be the same in all zones"
        );
    }

    #[test]
    fn scrub_bandwidth_is_limited_by_default() {
        let bound = |text: &str| {
            let pm = PmMemoryConfig::parse(&format!("pool=/p,size=2M{text}")).unwrap();
            pm.validate().unwrap();
            pm.scrub_bytes_per_s().map(NonZeroU64::get)
        };
        assert_eq!(bound(""), Some(1 << 30));
        assert_eq!(bound(",scrub_bandwidth=100M"), Some(100 << 20));
        assert_eq!(bound(",scrub_bandwidth=2M"), Some(2 << 20));
        assert_eq!(bound(",scrub_bandwidth=0"), None);
        let expected = "--pm-memory: scrub_bandwidth=\"1048576\" is not 0, for no bound, or at least 2 MiB per second";
        assert_eq!(error("pool=/p,size=2M,scrub_bandwidth=1M"), expected);
        assert!(error("pool=/p,size=2M,scrub_bandwidth=fast").contains("is not a size"));
        // The key may be missing in JSON from older clients.
        let pm: PmMemoryConfig =
            serde_json::from_str(r#"{"pool": "/p", "size": 2097152}"#).unwrap();
        assert_eq!(pm.scrub_bandwidth, 1 << 30);
    }

    #[test]
    fn spill_is_limited_by_the_size_of_the_zone() {
        let pm = PmMemoryConfig::parse("pool=/p,size=4M,spill=4M").unwrap();
        assert_eq!((pm.spill, pm.validate()), (4 << 20, Ok(())));
        let expected = |value| {
            format!(
                "--pm-memory: spill=\"{value}\" is not a multiple of 2 MiB up to the size of the zone, 4 MiB"
            )
        };
        assert_eq!(error("pool=/p,size=4M,spill=6M"), expected(6 << 20));
        assert_eq!(error("pool=/p,size=4M,spill=3M"), expected(3 << 20));
        let pm = PmMemoryConfig::parse("pool=/p,size=4M,spill=4M,spill_file=/disk").unwrap();
        assert_eq!((pm.spill_file.as_deref(), pm.validate()), (Some("/disk".as_ref()), Ok(())));
        assert_eq!(
            error("pool=/p,size=4M,spill_file=/disk"),
            "--pm-memory: spill_file has no effect without spill"
        );
    }

    #[test]
    fn watermarks_are_ordered_and_equal_in_all_zones() {
        let pm = |text: &str| PmMemoryConfig::parse(&format!("pool=/p,size=2M{text}")).unwrap();
        let marks = ",storage_min=64M,storage_low=128M,storage_high=256M";
        assert!(pm(marks).validate().is_ok() && !pm(marks).lends_promised());
        assert!(pm(",spill=2M").validate().is_ok() && pm(",spill=2M").lends_promised());
        for (text, expected) in [
            (
                "storage_low=129M",
                "storage_low is 129 MiB, and must be at most 128 MiB, the value of storage_high",
            ),
            (
                "storage_min=3M,storage_low=2M,storage_high=2M",
                "storage_min is 3 MiB, and must be at most 2 MiB, the value of storage_low",
            ),
            ("storage_high=8192T", "storage_high is 8192 TiB, and must be at most 4096 TiB"),
        ] {
            let text = format!("pool=/p,size=2M,{text}");
            assert_eq!(error(&text), format!("--pm-memory: {expected}"));
        }
        assert_eq!(
            validate_all(&[pm(marks), pm("")]).unwrap_err().to_string(),
            "--pm-memory: storage_min is 64 MiB in one zone and 32 MiB in another; it applies to the pool, and must be the same in all zones"
        );
    }

    #[test]
    fn plug_bandwidth_is_a_key_of_each_zone() {
        let pm = |text: &str| PmMemoryConfig::parse(&format!("pool=/p,size=2M{text}")).unwrap();
        assert_eq!(pm(",plug_bandwidth=100M").plug_bandwidth, 100 << 20);
        let zones = [pm(",plug_bandwidth=100M"), pm(",id=b,plug_bandwidth=0")];
        assert_eq!(validate_all(&zones), Ok(()));
        let expected = "--pm-memory: plug_bandwidth=\"1048576\" is not 0, for no bound, or at least 64 MiB per second";
        assert_eq!(error("pool=/p,size=2M,plug_bandwidth=1M"), expected);
        assert!(error("pool=/p,size=2M,plug_bandwidth=fast").contains("is not a size"));
        let pm: PmMemoryConfig =
            serde_json::from_str(r#"{"pool": "/p", "size": 2097152}"#).unwrap();
        assert_eq!(pm.plug_bandwidth, 1 << 30);
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("size=4G"), "--pm-memory: pool= is missing");
        assert_eq!(error("pool=/p"), "--pm-memory: size= is missing");
        assert_eq!(error("pool=/p,size=0"), "--pm-memory: size is 0, and must be at least 2 MiB");
        assert_eq!(
            error("pool=/p,size=2M,guest_numa_node=0"),
            "--pm-memory: guest_numa_node is 0, and must be 1 to 63"
        );
        assert!(error("pool=/p,size=2M,guest_numa_node=64").contains("is 64"));
        assert_eq!(
            error("pool=/p,size=2M,near=64"),
            "--pm-memory: near is 64, and must be 0 to 63"
        );
        for key in ["read_latency", "write_latency"] {
            for value in [0, 65535] {
                assert_eq!(
                    error(&format!("pool=/p,size=2M,{key}={value}")),
                    format!("--pm-memory: {key} is {value}, and must be 1 to 65534")
                );
            }
        }
        assert_eq!(
            error("pool=/p,size=2M,bandwidth=9M"),
            "--pm-memory: bandwidth is 9 MiB, and must be at least 10 MiB"
        );
        assert_eq!(
            error("pool=/p,size=2M,bandwidth=1T"),
            "--pm-memory: bandwidth is 1 TiB, and must be at most 655340 MiB"
        );
        assert!(error("pool=/p,size=3G,hugepages=on").contains("unknown key"));
    }
}
