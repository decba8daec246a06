//! `--disk`.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use foreshore_config::refused_keys as refused;
use foreshore_config::{ConfigError, OFF, Refused, name, section, words};

use super::serial::serial_number;
use crate::memory::layout::PCI_SLOTS;

/// Number of descriptors in a queue. A request needs two descriptors in addition to those for its
/// data. Other VMMs have the same upper limit.
const QUEUE_SIZES: RangeInclusive<u16> = 4..=1024;
/// Maximum length of a serial number in virtio-blk (virtio 1.3, 5.2.6).
const MAX_SERIAL_BYTES: usize = 20;

/// Logical block sizes that drivers of guests and disk images support.
const GUEST_BLOCK_SIZES: [u32; 2] = [512, 4096];

const HOW_IT_WORKS: &str = "io_uring is used where the host's kernel allows it";

const REFUSED: &[Refused] = &[
    Refused { key: "backing_files", neutral: OFF, why: "raw images have no backing files" },
    Refused {
        key: "queue_affinity",
        neutral: &["[]"],
        why: "pin the threads by their names, such as _disk0_q0",
    },
    Refused { key: "disable_io_uring", neutral: OFF, why: HOW_IT_WORKS },
    Refused { key: "_disable_io_uring", neutral: OFF, why: HOW_IT_WORKS },
    Refused { key: "_disable_aio", neutral: OFF, why: HOW_IT_WORKS },
    Refused { key: "disable_aio", neutral: OFF, why: HOW_IT_WORKS },
    // Both granularities have the same effect, because a byte range would cover the whole image.
    Refused {
        key: "lock_granularity",
        neutral: &["full", "byte-range", "ByteRange"],
        why: "the whole image is locked",
    },
    // QEMU's keys for block sizes.
    Refused {
        key: "logical_block_size",
        neutral: &[],
        why: "the key is guest_block_size=512 or 4096",
    },
    Refused {
        key: "physical_block_size",
        neutral: &[],
        why: "it equals that of the host's device, at least 4096",
    },
];

words! {
    /// Type of an image file.
    pub enum ImageType {
        /// Raw, unless the first bytes are those of another known format.
        Unknown = "Unknown" ("unknown") "unknown" hidden,
        /// Raw, regardless of the first bytes.
        Raw = "Raw" ("raw") "raw",
        /// Unsupported.
        Qcow2 = "Qcow2" ("qcow2") "qcow2" hidden,
        /// Unsupported.
        FixedVhd = "FixedVhd" ("vhd") "vhd" "fixed-vhd" hidden,
        /// Unsupported.
        Vhdx = "Vhdx" ("vhdx") "vhdx" hidden,
    }
}

impl ImageType {
    /// Name of an unsupported type.
    fn foreign_name(self) -> Option<&'static str> {
        match self {
            Self::Unknown | Self::Raw => None,
            Self::Qcow2 => Some("qcow2"),
            Self::FixedVhd => Some("vhd"),
            Self::Vhdx => Some("vhdx"),
        }
    }
}

section! {
    /// Disk.
    pub struct DiskConfig: "--disk" "Raw image files and block devices as virtio-blk disks" {
        path: PathBuf => "Image file or block device",
        readonly: bool = false => "Refuse writes of the guest",
        direct: bool = false => "Bypass the host's page cache",
        num_queues: u16 = 1 => "Queues, at most one for each vCPU",
        queue_size (range (QUEUE_SIZES)): u16 = 128 => "Descriptors of each queue",
        serial: Option<String> => "Serial number for the guest, instead of the id",
        id: Option<String> => "Name in the API and in metrics, instead of _disk0 and so on",
        image_type: ImageType = ImageType::Unknown
            => "Type of the file, instead of detection by its first bytes",
        sparse: bool = true => "Return discarded blocks to the file system",
        pci_device_id (syntax ("SLOT") range (1..=PCI_SLOTS - 1)): Option<u8>
            => "Slot on the PCI bus, instead of a free one",
        guest_block_size (syntax (GUEST_BLOCK_SIZES.map(|size| size.to_string()).join("|"))): Option<u32>
            => "Logical block size of the guest, instead of 512 for a file and the device's own",
    }
    refused &[refused::PCI, refused::VHOST_USER, refused::RATE_LIMITS, REFUSED];
}

impl DiskConfig {
    /// Kind of the device in ids and metrics.
    pub const KIND: &'static str = "disk";

    /// Checks the number and size of the queues and the length of the serial number. A disk may
    /// have at most `vcpus` queues.
    pub fn validate(&self, vcpus: u8) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        // A guest would never use more queues than it has vCPUs.
        if !(1..=u16::from(vcpus)).contains(&self.num_queues) {
            return Err(ConfigError::QueueCount {
                flag,
                value: self.num_queues,
                least: 1,
                most: vcpus.into(),
                why: format!("at most one for each vCPU, and --cpus has {vcpus}"),
            });
        }
        self.check_ranges()?;
        let conflict = |reason: String| Err(ConfigError::Conflict { flag, reason });
        if !self.queue_size.is_power_of_two() {
            return conflict(format!(
                "queue_size is {}, which is not a power of two",
                self.queue_size
            ));
        }
        if let Some(size) = self.guest_block_size
            && !GUEST_BLOCK_SIZES.contains(&size)
        {
            let [small, large] = GUEST_BLOCK_SIZES;
            return conflict(format!("guest_block_size is {size}, and must be {small} or {large}"));
        }
        if let Some(name) = self.image_type.foreign_name() {
            return Err(ConfigError::Unsupported {
                flag,
                key: "image_type",
                value: format!("={name}"),
                why: "only raw images are served; convert the image with `qemu-img convert -O raw`",
            });
        }
        self.id.as_ref().map_or(Ok(()), |id| name::check(flag, "id", id))?;
        match &self.serial {
            Some(serial) if serial.len() > MAX_SERIAL_BYTES => conflict(format!(
                "serial {serial:?} has {} bytes, more than the maximum {MAX_SERIAL_BYTES}",
                serial.len()
            )),
            _ => Ok(()),
        }
    }

    /// Serial number of the disk with index `nth`, as the guest reads it.
    pub fn serial_or_default(&self, nth: usize) -> String {
        serial_number(&self.serial.clone().unwrap_or_else(|| self.id_or_default(nth)))
    }

    /// Id of the disk with index `nth`, which starts at 0.
    pub fn id_or_default(&self, nth: usize) -> String {
        self.id.clone().unwrap_or_else(|| format!("_disk{nth}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        DiskConfig::parse(text).and_then(|disk| disk.validate(4)).unwrap_err().to_string()
    }

    #[test]
    fn flag_is_parsed() {
        let disk = DiskConfig::parse(
            "path=/d,readonly=on,direct=on,num_queues=4,queue_size=256,serial=abc,id=root,image_type=raw,\
             sparse=off,iommu=off,backing_files=off,pci_device_id=31,lock_granularity=byte-range,\
             guest_block_size=4096",
        )
        .unwrap();
        let expected = DiskConfig {
            path: "/d".into(),
            readonly: true,
            direct: true,
            num_queues: 4,
            queue_size: 256,
            serial: Some("abc".to_owned()),
            id: Some("root".to_owned()),
            image_type: ImageType::Raw,
            sparse: false,
            pci_device_id: Some(31),
            guest_block_size: Some(4096),
        };
        assert_eq!(disk, expected);
        assert!(disk.validate(4).is_ok());
    }

    #[test]
    fn unset_keys_have_the_defaults_of_cloud_hypervisor() {
        let disk = DiskConfig::parse("path=/d").unwrap();
        assert_eq!(
            (disk.readonly, disk.direct, disk.num_queues, disk.queue_size),
            (false, false, 1, 128)
        );
        assert!(disk.sparse && disk.validate(1).is_ok());
        assert_eq!(
            (disk.id_or_default(0), disk.id_or_default(2)),
            ("_disk0".into(), "_disk2".into())
        );
        assert_eq!(serde_json::from_str::<DiskConfig>(r#"{"path": "/d"}"#).unwrap(), disk);
        let of_type = |name: &str| {
            let json = format!(r#"{{"path": "/d", "image_type": "{name}"}}"#);
            serde_json::from_str::<DiskConfig>(&json).unwrap()
        };
        assert_eq!(of_type("Unknown"), disk);
        assert_eq!(of_type("Raw"), DiskConfig::parse("path=/d,image_type=Raw").unwrap());
        for name in ["Qcow2", "FixedVhd", "Vhdx"] {
            assert!(
                of_type(name).validate(1).unwrap_err().to_string().contains("only raw images"),
                "{name}"
            );
        }
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("readonly=on"), "--disk: path= is missing");
        assert_eq!(
            error("path=/d,num_queues=5"),
            "--disk: num_queues is 5, and must be 1 to 4: at most one for each vCPU, and --cpus has 4"
        );
        assert_eq!(
            error("path=/d,num_queues=0"),
            "--disk: num_queues is 0, and must be 1 to 4: at most one for each vCPU, and --cpus has 4"
        );
        assert_eq!(error("path=/d,queue_size=2"), "--disk: queue_size is 2, and must be 4 to 1024");
        assert_eq!(
            error("path=/d,queue_size=100"),
            "--disk: queue_size is 100, which is not a power of two"
        );
        assert!(
            error("path=/d,serial=123456789012345678901")
                .contains("21 bytes, more than the maximum 20")
        );
        for id in ["__disk", "a\nb", "a\0b"] {
            assert!(error(&format!("path=/d,id={id}")).contains("without '__' in front"), "{id:?}");
        }
        for id in ["volume/data", "a b", "ü", &"a".repeat(78), "_disk7"] {
            DiskConfig::parse(&format!("path=/d,id={id}")).unwrap().validate(4).unwrap();
        }
        assert_eq!(
            error("path=/d,pci_device_id=0"),
            "--disk: pci_device_id is 0, and must be 1 to 31"
        );
        assert_eq!(
            error("path=/d,pci_device_id=32"),
            "--disk: pci_device_id is 32, and must be 1 to 31"
        );
        for size in [0, 511, 520, 1024, 2048, 8192] {
            let refusal = format!("--disk: guest_block_size is {size}, and must be 512 or 4096");
            assert_eq!(error(&format!("path=/d,guest_block_size={size}")), refusal);
        }
        assert!(
            error("path=/d,guest_block_size=4K")
                .contains("guest_block_size=\"4K\" is not a whole number")
        );
        assert!(
            error("path=/d,logical_block_size=512")
                .contains("the key is guest_block_size=512 or 4096")
        );
        for name in ["qcow2", "vhd", "vhdx"] {
            let refusal = format!(
                "--disk: image_type={name} is not supported by foreshore: only raw images are"
            );
            assert!(error(&format!("path=/d,image_type={name}")).starts_with(&refusal), "{name}");
        }
        assert!(error("path=/d,image_type=iso").contains("is not raw"));
        assert!(error("path=/d,vhost_user=on").contains("vhost-user is not implemented"));
        assert!(error("path=/d,bw_size=1000").contains("rate limits are not implemented"));
    }
}
