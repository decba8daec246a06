//! `--cpus`: how many vCPUs there are, how they look to the guest, and where they run.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::{OFF, Options, Refused, Syntax};

const REFUSED: &[Refused] = &[
    Refused { key: "kvm_hyperv", neutral: OFF, why: "guests are Linux" },
    Refused { key: "profile", neutral: &["host", "Host"], why: "the guest has the host's CPU features" },
];

pub(super) const SYNTAX: Syntax = Syntax {
    flag: "--cpus",
    keys: &["boot", "max", "topology", "max_phys_bits", "affinity", "features", "nested", "core_scheduling"],
    words: &[],
    refused: &[REFUSED],
};

/// The most vCPUs that APIC ids of 8 bits can name: 255 is broadcast.
pub const MAX_VCPUS: u8 = 254;
/// A core has two threads at most: no processor that KVM runs on has more.
const MAX_THREADS: u16 = 2;
/// Every processor of 64 bits has as many address bits; page tables take no more.
const PHYS_BITS: std::ops::RangeInclusive<u8> = 36..=52;
/// Cloud Hypervisor's default.
const DEFAULT_PHYS_BITS: u8 = 46;
/// The host's CPUs that a set of them can name (`CPU_SETSIZE`).
const MAX_HOST_CPUS: usize = 1024;

/// `--cpus`, in JSON as Cloud Hypervisor writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpusConfig {
    /// vCPUs at boot.
    pub boot_vcpus: u8,
    /// vCPUs that may ever be.
    pub max_vcpus: u8,
    /// How they are grouped. Without it each NUMA node with vCPUs is a package, and every vCPU a core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<CpuTopology>,
    /// The most bits that a guest-physical address has; fewer if the host has fewer.
    #[serde(default = "default_phys_bits")]
    pub max_phys_bits: u8,
    /// Which CPUs of the host each vCPU may run on. One that is not named runs where the VMM does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Vec<CpuAffinity>>,
    /// Features that a guest has only if it asks.
    #[serde(default)]
    pub features: CpuFeatures,
    /// Whether the guest may run guests itself.
    #[serde(default = "yes")]
    pub nested: bool,
    /// With whom vCPUs share a core of the host.
    #[serde(default)]
    pub core_scheduling: CoreScheduling,
}

/// A number of units at each level, the smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTopology {
    /// Threads in a core.
    pub threads_per_core: u16,
    /// Cores in a die.
    pub cores_per_die: u16,
    /// Dies in a package.
    pub dies_per_package: u16,
    /// Packages.
    pub packages: u16,
}

/// Where a vCPU may run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuAffinity {
    /// Which vCPU.
    pub vcpu: u8,
    /// CPUs of the host.
    pub host_cpus: Vec<usize>,
}

/// Features that a guest has only if it asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuFeatures {
    /// Intel's matrix extensions.
    #[serde(default)]
    pub amx: bool,
}

/// With whom vCPUs share a core of the host, where it has threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CoreScheduling {
    /// With vCPUs of their VM.
    #[default]
    Vm,
    /// With nobody.
    Vcpu,
    /// With whoever comes.
    Off,
}

fn default_phys_bits() -> u8 {
    DEFAULT_PHYS_BITS
}

fn yes() -> bool {
    true
}

impl Default for CpusConfig {
    fn default() -> Self {
        Self {
            boot_vcpus: 1,
            max_vcpus: 1,
            topology: None,
            max_phys_bits: DEFAULT_PHYS_BITS,
            affinity: None,
            features: CpuFeatures::default(),
            nested: true,
            core_scheduling: CoreScheduling::default(),
        }
    }
}

impl CpuTopology {
    /// `T:C:D:P`.
    fn parse(text: &str) -> Option<Self> {
        let numbers: Vec<u16> = text.split(':').map(digits).collect::<Option<_>>()?;
        let [threads_per_core, cores_per_die, dies_per_package, packages] = *numbers else { return None };
        Some(Self { threads_per_core, cores_per_die, dies_per_package, packages })
    }

    /// Each level has a unit at least, threads are few, and all together are the vCPUs that may ever be.
    fn validate(&self, max_vcpus: u8) -> Result<(), ConfigError> {
        let levels = [
            ("topology's threads per core", self.threads_per_core, MAX_THREADS),
            ("topology's cores per die", self.cores_per_die, MAX_VCPUS.into()),
            ("topology's dies per package", self.dies_per_package, MAX_VCPUS.into()),
            ("topology's packages", self.packages, MAX_VCPUS.into()),
        ];
        for (key, value, most) in levels {
            if !(1..=most).contains(&value) {
                let (value, most) = (value.into(), most.into());
                return Err(ConfigError::OutOfRange { flag: SYNTAX.flag, key, value, least: 1, most });
            }
        }
        let product: u64 = levels.iter().map(|(_, value, _)| u64::from(*value)).product();
        if product != u64::from(max_vcpus) {
            let reason = format!("topology has {product} vCPUs, and must have as many as max: {max_vcpus}");
            return Err(ConfigError::Conflict { flag: SYNTAX.flag, reason });
        }
        Ok(())
    }
}

fn digits<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// What stands between brackets.
fn bracketed(text: &str) -> Option<&str> {
    text.strip_prefix('[')?.strip_suffix(']')
}

/// `[v@[a-b,c],...]`.
fn affinity(text: &str) -> Option<Vec<CpuAffinity>> {
    let mut list = Vec::new();
    let mut rest = bracketed(text)?;
    while !rest.is_empty() {
        let (vcpu, cpus) = rest.split_once('@')?;
        let (cpus, behind) = cpus.split_once(']')?;
        list.push(CpuAffinity { vcpu: digits(vcpu)?, host_cpus: host_cpus(cpus.strip_prefix('[')?)? });
        rest = match behind.strip_prefix(',') {
            Some(more) if !more.is_empty() => more,
            None if behind.is_empty() => "",
            _ => return None,
        };
    }
    Some(list)
}

/// `a-b,c`. What is beyond any host's is kept small: it is refused by its number later.
fn host_cpus(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (digits(first)?, digits(last)?);
        if first > last {
            return None;
        }
        cpus.extend((first..=last).take(MAX_HOST_CPUS + 1));
    }
    Some(cpus)
}

impl CoreScheduling {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "vm" => Some(Self::Vm),
            "vcpu" => Some(Self::Vcpu),
            "off" => Some(Self::Off),
            _ => None,
        }
    }
}

fn features(options: &Options) -> Result<CpuFeatures, ConfigError> {
    let read = |text: &str| match text {
        "amx" => Some(CpuFeatures { amx: true }),
        _ => None,
    };
    Ok(options.read("features", "amx", read)?.unwrap_or_default())
}

impl CpusConfig {
    /// Reads the flag's value; `max` is `boot` when it is not given.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        let boot_vcpus = options.number("boot")?.unwrap_or(1);
        let shape = "threads per core:cores per die:dies per package:packages";
        let places = "[vCPU@[CPUs of the host],...]";
        Ok(Self {
            boot_vcpus,
            max_vcpus: options.number("max")?.unwrap_or(boot_vcpus),
            topology: options.read("topology", shape, CpuTopology::parse)?,
            max_phys_bits: options.number("max_phys_bits")?.unwrap_or(DEFAULT_PHYS_BITS),
            affinity: options.read("affinity", places, affinity)?,
            features: features(&options)?,
            nested: options.switch("nested")?.unwrap_or(true),
            core_scheduling: options
                .read("core_scheduling", "vm, vcpu or off", CoreScheduling::parse)?
                .unwrap_or_default(),
        })
    }

    /// At least one, and not more at boot than ever; and that what is said of them is about them.
    pub fn validate(&self) -> Result<(), ConfigError> {
        range("boot", self.boot_vcpus, 1, MAX_VCPUS)?;
        range("max", self.max_vcpus, self.boot_vcpus, MAX_VCPUS)?;
        range("max_phys_bits", self.max_phys_bits, *PHYS_BITS.start(), *PHYS_BITS.end())?;
        if let Some(topology) = &self.topology {
            topology.validate(self.max_vcpus)?;
        }
        let mut named = BTreeSet::new();
        for affinity in self.affinity.iter().flatten() {
            range("affinity's vCPU", affinity.vcpu, 0, self.max_vcpus - 1)?;
            if !named.insert(affinity.vcpu) {
                let reason = format!("affinity names vCPU {} twice", affinity.vcpu);
                return Err(ConfigError::Conflict { flag: SYNTAX.flag, reason });
            }
            affinity.validate()?;
        }
        Ok(())
    }

    /// Which CPUs of the host a vCPU may run on; none: any.
    pub fn host_cpus(&self, vcpu: u8) -> &[usize] {
        let of_vcpu = self.affinity.iter().flatten().find(|affinity| affinity.vcpu == vcpu);
        of_vcpu.map_or(&[], |affinity| &affinity.host_cpus)
    }
}

fn range(key: &'static str, value: u8, least: u8, most: u8) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let (value, least, most) = (u64::from(value), u64::from(least), u64::from(most));
    Err(ConfigError::OutOfRange { flag: SYNTAX.flag, key, value, least, most })
}

impl CpuAffinity {
    fn validate(&self) -> Result<(), ConfigError> {
        let (flag, most) = (SYNTAX.flag, MAX_HOST_CPUS as u64 - 1);
        if self.host_cpus.is_empty() {
            let reason = format!("affinity leaves vCPU {} no CPU of the host", self.vcpu);
            return Err(ConfigError::Conflict { flag, reason });
        }
        match self.host_cpus.iter().find(|&&cpu| cpu >= MAX_HOST_CPUS) {
            Some(&cpu) => {
                let key = "affinity's CPU of the host";
                Err(ConfigError::OutOfRange { flag, key, value: cpu as u64, least: 0, most })
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Result<CpusConfig, ConfigError> {
        CpusConfig::parse(text).and_then(|cpus| cpus.validate().map(|()| cpus))
    }

    fn error(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    fn counts(boot_vcpus: u8, max_vcpus: u8) -> CpusConfig {
        CpusConfig { boot_vcpus, max_vcpus, ..CpusConfig::default() }
    }

    #[test]
    fn max_is_boot_unless_given() {
        assert_eq!(CpusConfig::parse("boot=2"), Ok(counts(2, 2)));
        assert_eq!(CpusConfig::parse("boot=2,max=4"), Ok(counts(2, 4)));
        assert_eq!(CpusConfig::parse("max=4"), Ok(counts(1, 4)));
        assert_eq!(CpusConfig::parse("boot=1,kvm_hyperv=off,profile=host"), Ok(CpusConfig::default()));
    }

    #[test]
    fn counts_out_of_range_are_named() {
        assert_eq!(error("boot=0"), "--cpus: boot is 0, and must be 1 to 254");
        assert_eq!(error("boot=255"), "--cpus: boot is 255, and must be 1 to 254");
        assert_eq!(error("boot=4,max=2"), "--cpus: max is 2, and must be 4 to 254");
        assert!(error("boot=300").contains(r#"boot="300""#));
    }

    #[test]
    fn a_topology_has_as_many_vcpus_as_there_may_ever_be() {
        let topology = |text: &str| read(text).unwrap().topology.unwrap();
        assert_eq!(
            topology("boot=1,max=24,topology=2:3:2:2"),
            CpuTopology { threads_per_core: 2, cores_per_die: 3, dies_per_package: 2, packages: 2 }
        );
        let wrong = |text: &str| error(&format!("boot=2,max=8,topology={text}"));
        assert_eq!(wrong("2:3:1:1"), "--cpus: topology has 6 vCPUs, and must have as many as max: 8");
        assert_eq!(wrong("4:2:1:1"), "--cpus: topology's threads per core is 4, and must be 1 to 2");
        assert_eq!(wrong("1:0:1:8"), "--cpus: topology's cores per die is 0, and must be 1 to 254");
        for text in ["2:2:2", "2:2:2:1:1", "2:2:2:x", "", "2:2:2:-1", "2:2:2:65536"] {
            assert!(wrong(text).contains("is not threads per core:cores per die"), "{text}");
        }
        // No product is too large to be told.
        let all = "--cpus: topology has 32774128 vCPUs, and must have as many as max: 8";
        assert_eq!(wrong("2:254:254:254"), all);
    }

    #[test]
    fn where_vcpus_run_is_a_list_of_lists() {
        let cpus = read("boot=2,affinity=[0@[0-3,5],1@[4]]").unwrap();
        assert_eq!((cpus.host_cpus(0), cpus.host_cpus(1)), (&[0, 1, 2, 3, 5][..], &[4][..]));
        assert!(read("boot=2,affinity=[1@[4]]").unwrap().host_cpus(0).is_empty());
        for text in ["0@[1]", "[0]", "[0@1]", "[0@[3-1]]", "[0@[1],]", "[0@[1]1@[2]]", "[x@[1]]", "[0@[]]"] {
            let told = error(&format!("boot=2,affinity={text}"));
            assert!(told.contains("is not [vCPU@[CPUs of the host],...]"), "{text}: {told}");
        }
        assert_eq!(error("boot=2,affinity=[2@[0]]"), "--cpus: affinity's vCPU is 2, and must be 0 to 1");
        assert_eq!(error("boot=2,affinity=[1@[0],1@[1]]"), "--cpus: affinity names vCPU 1 twice");
        let beyond = "--cpus: affinity's CPU of the host is 1024, and must be 0 to 1023";
        assert_eq!(error("boot=2,affinity=[1@[1024]]"), beyond);
        assert_eq!(error("boot=2,affinity=[1@[0-18446744073709551615]]"), beyond);
    }

    #[test]
    fn what_the_guest_sees_and_shares_can_be_said() {
        let cpus = read("boot=1,nested=off,max_phys_bits=40,core_scheduling=vcpu,features=amx").unwrap();
        assert_eq!((cpus.nested, cpus.max_phys_bits, cpus.features.amx), (false, 40, true));
        assert_eq!(cpus.core_scheduling, CoreScheduling::Vcpu);
        assert_eq!(error("boot=1,max_phys_bits=35"), "--cpus: max_phys_bits is 35, and must be 36 to 52");
        assert!(error("boot=1,max_phys_bits=53").contains("36 to 52"));
        assert!(error("boot=1,core_scheduling=both").contains("is not vm, vcpu or off"));
        assert!(error("boot=1,features=avx").contains("is not amx"));
        assert!(error("boot=1,kvm_hyperv=on").contains("guests are Linux"));
        assert!(error("boot=1,profile=sapphire").contains("the host's CPU features"));
    }

    #[test]
    fn json_is_cloud_hypervisors() {
        let written = json!({
            "boot_vcpus": 1, "max_vcpus": 4,
            "topology": {"threads_per_core": 1, "cores_per_die": 4, "dies_per_package": 1, "packages": 1},
            "max_phys_bits": 46, "affinity": [{"vcpu": 0, "host_cpus": [0, 1]}], "features": {"amx": false},
            "nested": true, "core_scheduling": "Vm"
        });
        let cpus: CpusConfig = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(serde_json::to_value(&cpus).unwrap(), written);
        let least: CpusConfig = serde_json::from_value(json!({"boot_vcpus": 1, "max_vcpus": 1})).unwrap();
        assert_eq!(least, CpusConfig::default());
        let json = json!({"boot_vcpus": 1, "max_vcpus": 2, "affinity": [{"vcpu": 1, "host_cpus": []}]});
        let empty: CpusConfig = serde_json::from_value(json).unwrap();
        let told = empty.validate().unwrap_err().to_string();
        assert_eq!(told, "--cpus: affinity leaves vCPU 1 no CPU of the host");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(boot=[0-9]{0,3},)?(topology|affinity)=[0-9:@,\\[\\]-]{0,20}") {
            drop(read(&text));
        }
    }
}
