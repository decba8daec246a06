//! Decides whether a guest's BTT driver is safe for a volume, without side effects.
//!
//! drivers/nvdimm in Linux has two known faults that a VMM cannot work around:
//!
//! | fault | kernels | condition | effect |
//! |---|---|---|---|
//! | lanes are shared by mistake (CVE-2026-74365; since 36c75ce3bd29, fixed by 8d4b989d9c9a) | [`LANES_SHARED`] | the guest preempts fully | silent corruption, by any interface with translation in the guest |
//! | virtio-pmem's flush sleeps under BTT's spinlock | all | more than one vCPU | "scheduling while atomic", and writers die |
//!
//! An agent may report a false kernel. The report affects only a warning and a metric.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::interface::Chosen;

/// Kernel version, for example `6.12.117`. It determines which fixes the kernel includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    major: u16,
    minor: u16,
    patch: u16,
}

impl KernelVersion {
    const fn new(major: u16, minor: u16, patch: u16) -> Self {
        Self { major, minor, patch }
    }
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Kernels in which two writers may use the same lane if one preempts the other. Each entry is the
/// first affected version and the first fixed version of a series.
///
/// The ranges are from the kernel's own CVE record. 6.1 and 6.12 are exceptions: their first fixed
/// versions are Debian's, whose updates skipped the versions in between.
pub const LANES_SHARED: [(KernelVersion, KernelVersion); 9] = [
    (KernelVersion::new(4, 19, 299), KernelVersion::new(4, 20, 0)),
    (KernelVersion::new(5, 4, 261), KernelVersion::new(5, 5, 0)),
    (KernelVersion::new(5, 10, 201), KernelVersion::new(5, 11, 0)),
    (KernelVersion::new(5, 15, 139), KernelVersion::new(5, 16, 0)),
    (KernelVersion::new(6, 1, 63), KernelVersion::new(6, 1, 180)),
    (KernelVersion::new(6, 5, 12), KernelVersion::new(6, 6, 145)),
    (KernelVersion::new(6, 7, 0), KernelVersion::new(6, 12, 100)),
    (KernelVersion::new(6, 13, 0), KernelVersion::new(6, 18, 40)),
    (KernelVersion::new(6, 19, 0), KernelVersion::new(7, 1, 5)),
];

/// Preemption model of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preemption {
    /// `preempt=full`, or a real-time kernel.
    Full,
    /// `none`, `voluntary`, or a kernel without preemption models.
    Not,
    /// The kernel can switch models and the agent does not know the current one, or this program
    /// does not know the model.
    Unknown,
}

impl Preemption {
    /// Parses `preemption` of a hello message. `lazy` counts as full preemption: it preempts
    /// immediately for real-time tasks and at the next tick for others, at any point in the kernel.
    pub fn parse(text: &str) -> Self {
        match text {
            "full" | "lazy" | "rt" => Self::Full,
            "none" | "voluntary" | "static" => Self::Not,
            _ => Self::Unknown,
        }
    }
}

/// Guest kernel, as the agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestKernel {
    /// `uname -r`.
    pub release: String,
    /// `uname -v`. Empty from older agents.
    pub version: String,
    /// Preemption model, as named by the agent.
    pub preemption: String,
}

impl GuestKernel {
    /// Version that determines which fixes the kernel includes, if known.
    ///
    /// Debian and Ubuntu name their kernels by an ABI number, `6.1.0-56-cloud-amd64`, which fixes
    /// do not change. In `uname -v`, the version follows the word "Debian": `#1 SMP PREEMPT_DYNAMIC
    /// Debian 6.1.192-2 (2026-11-14)`.
    pub fn fixes(&self) -> Option<KernelVersion> {
        let words = self.version.split_ascii_whitespace();
        let package = words.skip_while(|word| *word != "Debian").nth(1);
        if let Some(version) = package.and_then(parse_version) {
            return Some(version);
        }
        let version = parse_version(&self.release)?;
        // `6.1.0-56` is an ABI number. Such a kernel has its distribution's own fixes.
        let is_abi =
            version.patch == 0 && self.release.split('-').nth(1).is_some_and(starts_with_digit);
        (!is_abi).then_some(version)
    }
}

fn starts_with_digit(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

/// Parses two or three numbers at the start of the text.
fn parse_version(text: &str) -> Option<KernelVersion> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let mut numbers =
        text[..end].split('.').filter(|number| !number.is_empty()).map(str::parse::<u16>);
    let (major, minor) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    let patch = numbers.next().unwrap_or(Ok(0)).ok()?;
    Some(KernelVersion { major, minor, patch })
}

/// Verdict on a guest's BTT driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verdict", content = "reason")]
pub enum Verdict {
    /// The driver has no known faults.
    Safe,
    /// Neither the kernel's fixes nor its preemption are known. Most such kernels are not affected.
    Unknown,
    /// The driver may be unsafe, but a decisive fact is unknown.
    Suspect(String),
    /// The driver can corrupt the volume or break the guest.
    Unsafe(String),
}

impl Verdict {
    /// Labels of the metric. The metric has a sample for each from the start.
    pub const LABELS: [&'static str; 4] = ["safe", "unknown", "suspect", "unsafe"];

    /// Severity: the index in [`Verdict::LABELS`].
    pub fn severity(&self) -> usize {
        match self {
            Self::Safe => 0,
            Self::Unknown => 1,
            Self::Suspect(_) => 2,
            Self::Unsafe(_) => 3,
        }
    }

    pub fn label(&self) -> &'static str {
        Self::LABELS[self.severity()]
    }

    /// Reason for `Suspect` and `Unsafe`.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Safe | Self::Unknown => None,
            Self::Suspect(reason) | Self::Unsafe(reason) => Some(reason),
        }
    }
}

/// Judges the BTT driver of `kernel` for a volume with this `interface` in a guest with up to
/// `max_vcpus`.
///
/// Applies only to volumes that the guest translates itself: format btt with interface nvdimm or
/// virtio-pmem.
pub fn classify(kernel: &GuestKernel, interface: Chosen, max_vcpus: u8) -> Verdict {
    if interface == Chosen::VirtioPmem && max_vcpus > 1 {
        return Verdict::Unsafe(format!(
            "with {max_vcpus} possible vCPUs its BTT sleeps under a spinlock when virtio-pmem flushes, on every kernel"
        ));
    }
    let preemption = Preemption::parse(&kernel.preemption);
    if preemption == Preemption::Not {
        return Verdict::Safe;
    }
    let affected = kernel.fixes().map(|fixes| (fixes, shares_lanes(fixes)));
    match (affected, preemption) {
        (Some((_, false)), _) | (_, Preemption::Not) => Verdict::Safe,
        (Some((fixes, true)), Preemption::Full) => Verdict::Unsafe(format!(
            "kernel {fixes} preempts fully, and its BTT then lets two writers share a lane (CVE-2026-74365)"
        )),
        (Some((fixes, true)), Preemption::Unknown) => Verdict::Suspect(format!(
            "the BTT of kernel {fixes} lets two writers share a lane if it preempts fully (CVE-2026-74365), and the \
             agent cannot determine if it does"
        )),
        (None, Preemption::Full) => Verdict::Suspect(format!(
            "kernel {:?} preempts fully, and its release does not show if its BTT has the fix of CVE-2026-74365",
            kernel.release
        )),
        (None, Preemption::Unknown) => Verdict::Unknown,
    }
}

fn shares_lanes(fixes: KernelVersion) -> bool {
    LANES_SHARED.iter().any(|(first, fixed)| (*first..*fixed).contains(&fixes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kernel(release: &str, version: &str, preemption: &str) -> GuestKernel {
        GuestKernel {
            release: release.to_owned(),
            version: version.to_owned(),
            preemption: preemption.to_owned(),
        }
    }

    fn label(release: &str, preemption: &str) -> &'static str {
        classify(&kernel(release, "#1 SMP", preemption), Chosen::Nvdimm, 4).label()
    }

    #[test]
    fn first_and_fixed_versions_of_every_series() {
        let edges = [
            ("4.19.298", false),
            ("4.19.299", true),
            ("4.20.0", false),
            ("5.4.260", false),
            ("5.4.261", true),
            ("5.10.200", false),
            ("5.10.201", true),
            ("5.15.138", false),
            ("5.15.139", true),
            ("5.16.0", false),
            ("6.1.0", false),
            ("6.1.62", false),
            ("6.1.63", true),
            ("6.1.179", true),
            ("6.1.180", false),
            ("6.1.192", false),
            ("6.2.0", false),
            ("6.5.11", false),
            ("6.5.12", true),
            ("6.6.0", true),
            ("6.6.144", true),
            ("6.6.145", false),
            ("6.7.0", true),
            ("6.11.0", true),
            ("6.12.0", true),
            ("6.12.99", true),
            ("6.12.100", false),
            ("6.12.117", false),
            ("6.13", true),
            ("6.18.39", true),
            ("6.18.40", false),
            ("6.19.1", true),
            ("7.0.0", true),
            ("7.1.4", true),
            ("7.1.5", false),
            ("7.2.0", false),
            ("65535.0.0", false),
        ];
        for (release, affected) in edges {
            let expected = if affected { ["unsafe", "safe", "suspect"] } else { ["safe"; 3] };
            for (preemption, expected) in ["full", "voluntary", "dynamic"].into_iter().zip(expected)
            {
                assert_eq!(label(release, preemption), expected, "{release} {preemption}");
            }
        }
    }

    #[test]
    fn preemption_models_are_parsed() {
        for (model, expected) in [
            ("full", "unsafe"),
            ("lazy", "unsafe"),
            ("rt", "unsafe"),
            ("none", "safe"),
            ("voluntary", "safe"),
            ("static", "safe"),
            ("dynamic", "suspect"),
            ("", "suspect"),
            ("FULL", "suspect"),
        ] {
            assert_eq!(label("6.12.50", model), expected, "{model}");
        }
    }

    #[test]
    fn debian_version_is_read_from_the_build() {
        let debian = |release, build, preemption| {
            let version = format!("#1 SMP PREEMPT_DYNAMIC Debian {build} (2026-11-14)");
            classify(&kernel(release, &version, preemption), Chosen::Nvdimm, 1).label()
        };
        assert_eq!(debian("6.1.0-56-cloud-amd64", "6.1.192-2", "full"), "safe");
        assert_eq!(debian("6.1.0-32-cloud-amd64", "6.1.129-1", "full"), "unsafe");
        assert_eq!(debian("6.12.117+deb12-cloud-amd64", "6.12.117-1~deb12u1", "full"), "safe");
        assert_eq!(debian("6.12.57+deb13-amd64", "6.12.57-1", "full"), "unsafe");
        assert_eq!(debian("6.12.57+deb13-amd64", "6.12.57-1", "voluntary"), "safe");
        // The version in `uname -v` takes precedence over the release. An invalid version is
        // ignored.
        assert_eq!(debian("6.12.57+deb13-amd64", "bookworm", "full"), "unsafe");
    }

    #[test]
    fn unknown_fixes_are_suspect_only_with_full_preemption() {
        for release in [
            "6.1.0-56-amd64",
            "6.8.0-45-generic",
            "linux",
            "6",
            "6.x",
            "99999.1.1",
            "",
            "6.1.70000",
        ] {
            assert_eq!(label(release, "full"), "suspect", "{release}");
            assert_eq!(label(release, "voluntary"), "safe", "{release}");
            assert_eq!(label(release, "dynamic"), "unknown", "{release}");
        }
        // Kernels that are named by their version: a release candidate, the first version of a
        // series, and Fedora's.
        assert_eq!(label("6.8.0-rc1", "full"), "unsafe");
        assert_eq!(label("6.8.0", "full"), "unsafe");
        assert_eq!(label("6.8.12-200.fc39.x86_64", "full"), "unsafe");
    }

    #[test]
    fn virtio_pmem_with_several_vcpus_is_unsafe_on_every_kernel() {
        for release in ["6.12.117", "6.1.10", "99.0.0", "linux"] {
            let kernel = kernel(release, "", "voluntary");
            let verdict = classify(&kernel, Chosen::VirtioPmem, 2);
            assert!(
                verdict.reason().is_some_and(|reason| reason.contains("spinlock")),
                "{verdict:?}"
            );
            assert_eq!(verdict.label(), "unsafe");
            assert_eq!(classify(&kernel, Chosen::VirtioPmem, 1), Verdict::Safe);
            assert_eq!(classify(&kernel, Chosen::Nvdimm, 2), Verdict::Safe);
        }
        assert_eq!(
            classify(&kernel("6.12.50", "", "full"), Chosen::VirtioPmem, 1).label(),
            "unsafe"
        );
    }

    #[test]
    fn table_is_sorted_and_without_empty_ranges() {
        let edges: Vec<_> =
            LANES_SHARED.iter().flat_map(|(first, fixed)| [*first, *fixed]).collect();
        assert!(edges.windows(2).all(|pair| pair[0] < pair[1]), "{edges:?}");
    }

    proptest! {
        #[test]
        fn no_text_panics(release in ".*", version in ".*", preemption in "[a-z]{0,9}|.*") {
            let kernel = kernel(&release, &version, &preemption);
            for interface in [Chosen::Nvdimm, Chosen::VirtioPmem] {
                let _ = classify(&kernel, interface, 2);
            }
        }
    }
}
