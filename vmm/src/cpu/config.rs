//! `--cpus`: number of vCPUs, their topology, their features and their host CPUs.

use std::collections::BTreeSet;

use foreshore_config::{
    ConfigError, FlagValue, Item, OFF, Refused, digits, items, range as digit_range, section,
    unbracketed, words,
};

const REFUSED: &[Refused] = &[
    Refused { key: "kvm_hyperv", neutral: OFF, why: "guests are Linux" },
    Refused {
        key: "profile",
        neutral: &["host", "Host"],
        why: "the guest has the host's CPU features",
    },
];

/// Maximum number of vCPUs. APIC IDs have 8 bits, and 255 addresses all vCPUs.
pub const MAX_VCPUS: u8 = 254;
/// No processor that KVM supports has more than two threads per core.
const MAX_THREADS: u16 = 2;
/// Every 64-bit processor has at least 36 address bits, and page tables support at most 52.
const PHYS_BITS: std::ops::RangeInclusive<u8> = 36..=52;
const DEFAULT_PHYS_BITS: u8 = 46;
/// Number of CPUs in a set of host CPUs (`CPU_SETSIZE`).
const MAX_HOST_CPUS: usize = 1024;

section! {
    /// vCPUs.
    pub struct CpusConfig: "--cpus" "vCPUs" {
        boot_vcpus (flag "boot" range (1..=MAX_VCPUS) json_required): u8 = 1 => "vCPUs at boot",
        max_vcpus (flag "max" derived json_required): u8 = boot_vcpus
            => "Upper limit of vCPUs, instead of the number at boot",
        topology: Option<CpuTopology>
            => "Threads per core, cores per die, dies per package and packages; else a package per node",
        max_phys_bits (range (PHYS_BITS)): u8 = DEFAULT_PHYS_BITS
            => "Upper limit of the width of guest-physical addresses in bits",
        affinity: Option<Vec<CpuAffinity>>
            => "Host CPUs that each vCPU may run on, instead of those of the VMM",
        features: CpuFeatures = CpuFeatures::default()
            => "CPU features that are off by default",
        nested: bool = true => "Let the guest run guests",
        core_scheduling: CoreScheduling = CoreScheduling::Vm
            => "Tasks that may share a host core with a vCPU",
    }
    refused &[REFUSED];
    defaults true;
}

section! {
    /// Number of units at each level, from the smallest level to the largest.
    #[derive(Copy)]
    pub struct CpuTopology: "--cpus" {
        threads_per_core: u16 => "Threads in a core",
        cores_per_die: u16 => "Cores in a die",
        dies_per_package: u16 => "Dies in a package",
        packages: u16 => "Packages",
    }
}

section! {
    /// Host CPUs that a vCPU may run on.
    pub struct CpuAffinity: "--cpus" {
        vcpu: u8 => "vCPU",
        host_cpus (shown json_required): Vec<usize> => "CPUs of the host",
    }
}

section! {
    /// CPU features that are off by default.
    #[derive(Copy)]
    pub struct CpuFeatures: "--cpus" {
        amx: bool = false => "Intel's matrix extensions",
    }
    defaults true;
}

words! {
    /// Tasks that may run on the same host core as a vCPU, if the core has several threads.
    pub enum CoreScheduling {
        /// Other vCPUs of the same VM.
        Vm = "Vm" "vm",
        /// No other task.
        Vcpu = "Vcpu" "vcpu",
        /// Any other task.
        Off = "Off" "off",
    }
}

impl FlagValue for CpuTopology {
    fn syntax() -> String {
        "N:N:N:N".to_owned()
    }

    fn expected() -> String {
        "threads per core:cores per die:dies per package:packages".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        let numbers: Vec<u16> = text.split(':').map(digits).collect::<Option<_>>()?;
        let [threads_per_core, cores_per_die, dies_per_package, packages] = *numbers else {
            return None;
        };
        Some(Self { threads_per_core, cores_per_die, dies_per_package, packages })
    }
}

/// Name of [`CpuFeatures::amx`] in the flag.
const AMX: &str = "amx";

impl FlagValue for CpuFeatures {
    fn syntax() -> String {
        AMX.to_owned()
    }

    fn expected() -> String {
        Self::syntax()
    }

    fn words() -> Vec<&'static str> {
        vec![AMX]
    }

    fn read(text: &str) -> Option<Self> {
        let mut features = Self::default();
        for name in items(text)? {
            match name {
                AMX => features.amx = true,
                _ => return None,
            }
        }
        Some(features)
    }
}

impl Item for CpuAffinity {
    const SYNTAX: &'static str = "[N@[N-N,N],N@[N]]";
    const EXPECTED: &'static str = "[vCPU@[CPUs of the host],...]";

    fn read_item(text: &str) -> Option<Vec<Self>> {
        let (vcpu, host_cpus) = text.split_once('@')?;
        let mut cpus = Vec::new();
        for part in unbracketed(host_cpus).split(',') {
            let (first, last) = digit_range::<usize>(part.trim())?;
            // One CPU above the limit is enough, because `validate` then refuses the list.
            cpus.extend((first..=last).take(MAX_HOST_CPUS + 1));
        }
        Some(vec![Self { vcpu: digits(vcpu)?, host_cpus: cpus }])
    }
}

impl CpuTopology {
    /// Checks that each level has at least one unit, that there are not too many threads, and that
    /// the product is `max_vcpus`.
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
                return Err(ConfigError::OutOfRange {
                    flag: CpusConfig::FLAG,
                    key,
                    value,
                    least: 1,
                    most,
                });
            }
        }
        let product: u64 = levels.iter().map(|(_, value, _)| u64::from(*value)).product();
        if product != u64::from(max_vcpus) {
            let reason =
                format!("topology has {product} vCPUs, and must have as many as max: {max_vcpus}");
            return Err(ConfigError::Conflict { flag: CpusConfig::FLAG, reason });
        }
        Ok(())
    }
}

impl CpusConfig {
    /// Checks that `max` is at least `boot`, and that the topology has `max` vCPUs. `affinity` may
    /// contain each vCPU only once.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        range("max", self.max_vcpus, self.boot_vcpus, MAX_VCPUS)?;
        if let Some(topology) = &self.topology {
            topology.validate(self.max_vcpus)?;
        }
        let mut named = BTreeSet::new();
        for affinity in self.affinity.iter().flatten() {
            range("affinity's vCPU", affinity.vcpu, 0, self.max_vcpus - 1)?;
            if !named.insert(affinity.vcpu) {
                let reason = format!("affinity names vCPU {} twice", affinity.vcpu);
                return Err(ConfigError::Conflict { flag: CpusConfig::FLAG, reason });
            }
            affinity.validate()?;
        }
        Ok(())
    }

    /// Host CPUs that `vcpu` may run on; empty if it may run on any.
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
    Err(ConfigError::OutOfRange { flag: CpusConfig::FLAG, key, value, least, most })
}

impl CpuAffinity {
    fn validate(&self) -> Result<(), ConfigError> {
        let (flag, most) = (CpusConfig::FLAG, MAX_HOST_CPUS as u64 - 1);
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
    fn max_defaults_to_boot() {
        assert_eq!(CpusConfig::parse("boot=2"), Ok(counts(2, 2)));
        assert_eq!(CpusConfig::parse("boot=2,max=4"), Ok(counts(2, 4)));
        assert_eq!(CpusConfig::parse("max=4"), Ok(counts(1, 4)));
        assert_eq!(
            CpusConfig::parse("boot=1,kvm_hyperv=off,profile=host"),
            Ok(CpusConfig::default())
        );
    }

    #[test]
    fn counts_out_of_range_are_named() {
        assert_eq!(error("boot=0"), "--cpus: boot is 0, and must be 1 to 254");
        assert_eq!(error("boot=255"), "--cpus: boot is 255, and must be 1 to 254");
        assert_eq!(error("boot=4,max=2"), "--cpus: max is 2, and must be 4 to 254");
        assert!(error("boot=300").contains(r#"boot="300""#));
    }

    #[test]
    fn topology_must_multiply_to_max() {
        let topology = |text: &str| read(text).unwrap().topology.unwrap();
        assert_eq!(
            topology("boot=1,max=24,topology=2:3:2:2"),
            CpuTopology { threads_per_core: 2, cores_per_die: 3, dies_per_package: 2, packages: 2 }
        );
        let wrong = |text: &str| error(&format!("boot=2,max=8,topology={text}"));
        assert_eq!(
            wrong("2:3:1:1"),
            "--cpus: topology has 6 vCPUs, and must have as many as max: 8"
        );
        assert_eq!(
            wrong("4:2:1:1"),
            "--cpus: topology's threads per core is 4, and must be 1 to 2"
        );
        assert_eq!(wrong("1:0:1:8"), "--cpus: topology's cores per die is 0, and must be 1 to 254");
        for text in ["2:2:2", "2:2:2:1:1", "2:2:2:x", "2:2:2:-1", "2:2:2:65536"] {
            assert!(wrong(text).contains("is not threads per core:cores per die"), "{text}");
        }
        // The product of the levels does not overflow.
        let all = "--cpus: topology has 32774128 vCPUs, and must have as many as max: 8";
        assert_eq!(wrong("2:254:254:254"), all);
    }

    #[test]
    fn affinity_is_a_list_of_lists() {
        let cpus = read("boot=2,affinity=[0@[0-3,5],1@[4]]").unwrap();
        assert_eq!((cpus.host_cpus(0), cpus.host_cpus(1)), (&[0, 1, 2, 3, 5][..], &[4][..]));
        assert!(read("boot=2,affinity=[1@[4]]").unwrap().host_cpus(0).is_empty());
        for text in ["[0@0,1@1-2]", "[0@[0], 1@[1,2]]"] {
            let cpus = read(&format!("boot=2,affinity={text}")).unwrap();
            assert_eq!((cpus.host_cpus(0), cpus.host_cpus(1)), (&[0][..], &[1, 2][..]), "{text}");
        }
        assert_eq!(read("boot=2,affinity=1@[4]"), read("boot=2,affinity=[1@[4]]"));
        for text in ["[0]", "[0@[3-1]]", "[0@[1],]", "[0@[1]1@[2]]", "[x@[1]]", "[0@[]]"] {
            let message = error(&format!("boot=2,affinity={text}"));
            assert!(message.contains("is not [vCPU@[CPUs of the host],...]"), "{text}: {message}");
        }
        assert_eq!(
            error("boot=2,affinity=[2@[0]]"),
            "--cpus: affinity's vCPU is 2, and must be 0 to 1"
        );
        assert_eq!(error("boot=2,affinity=[1@[0],1@[1]]"), "--cpus: affinity names vCPU 1 twice");
        let beyond = "--cpus: affinity's CPU of the host is 1024, and must be 0 to 1023";
        assert_eq!(error("boot=2,affinity=[1@[1024]]"), beyond);
        assert_eq!(error("boot=2,affinity=[1@[0-18446744073709551615]]"), beyond);
    }

    #[test]
    fn features_nesting_and_core_scheduling_are_configurable() {
        let cpus =
            read("boot=1,nested=off,max_phys_bits=40,core_scheduling=vcpu,features=amx").unwrap();
        assert_eq!((cpus.nested, cpus.max_phys_bits, cpus.features.amx), (false, 40, true));
        assert_eq!(cpus.core_scheduling, CoreScheduling::Vcpu);
        assert_eq!(
            error("boot=1,max_phys_bits=35"),
            "--cpus: max_phys_bits is 35, and must be 36 to 52"
        );
        assert!(error("boot=1,max_phys_bits=53").contains("36 to 52"));
        assert!(
            read("features=[amx]").unwrap().features.amx
                && !read("features=").unwrap().features.amx
        );
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
        let least: CpusConfig =
            serde_json::from_value(json!({"boot_vcpus": 1, "max_vcpus": 1})).unwrap();
        assert_eq!(least, CpusConfig::default());
        let json =
            json!({"boot_vcpus": 1, "max_vcpus": 2, "affinity": [{"vcpu": 1, "host_cpus": []}]});
        let empty: CpusConfig = serde_json::from_value(json).unwrap();
        let message = empty.validate().unwrap_err().to_string();
        assert_eq!(message, "--cpus: affinity leaves vCPU 1 no CPU of the host");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(boot=[0-9]{0,3},)?(topology|affinity)=[0-9:@,\\[\\]-]{0,20}") {
            drop(read(&text));
        }
    }
}
