//! `--pm-volume`.

use std::path::PathBuf;

use foreshore_config::{ConfigError, FlagValue, JsonError, JsonValue, Walk, section, size, words};
use foreshore_types::VolumeFormat;
use foreshore_types::similar::suggestion;
use foreshore_types::size::SizeError;
use pmem_volume::pool::VolumeName;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::guest_btt::VolumeKey;
use crate::file_id::is_same;
use crate::memory::lost_memory::RangeSource;

words! {
    /// Interface through which the guest accesses a volume.
    pub enum VolumeInterface {
        /// The safest interface that the guest can use.
        Auto = "auto" "auto",
        /// An NVDIMM, by ACPI NFIT.
        Nvdimm = "nvdimm" "nvdimm",
        /// A virtio-pmem device.
        VirtioPmem = "virtio-pmem" "virtio-pmem",
        /// A virtio-blk disk. The VMM translates the sectors.
        VirtioBlk = "virtio-blk" "virtio-blk",
    }
}

words! {
    /// Effect of a write of the guest that finds no space in the pool.
    pub enum OnFull {
        /// The write waits, and the VM is paused until the pool has space.
        Pause = "pause" "pause",
        /// The write fails with an I/O error.
        Error = "error" "error",
    }
}

/// Size of a volume. In JSON, it is a number of bytes or `"remaining"`, as in the flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeSize {
    Existing,
    Bytes(u64),
    /// All of the pool that the other volumes and the VM's `--pm-memory` leave. The size is
    /// computed at each boot.
    Remaining,
}

/// Word in the flag and in JSON.
const REMAINING: &str = "remaining";

/// Text after "must be" in an error about JSON.
const BYTES_OR_REMAINING: &str = "a whole number of bytes, or \"remaining\"";

impl Serialize for VolumeSize {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Existing => to.serialize_none(),
            Self::Bytes(bytes) => to.serialize_u64(*bytes),
            Self::Remaining => to.serialize_str(REMAINING),
        }
    }
}

impl JsonValue for VolumeSize {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        match (&json, json.as_u64()) {
            (_, Some(bytes)) => Ok(Self::Bytes(bytes)),
            (Value::String(word), _) if word == REMAINING => Ok(Self::Remaining),
            _ => Err(walk.wrong(&json, BYTES_OR_REMAINING)),
        }
    }

    fn absent() -> Option<Self> {
        Some(Self::Existing)
    }

    fn is_absent(&self) -> bool {
        *self == Self::Existing
    }
}

impl FlagValue for VolumeSize {
    fn syntax() -> String {
        format!("{}|{REMAINING}", u64::syntax())
    }

    fn expected() -> String {
        format!("{}, or {REMAINING}", u64::expected())
    }

    fn words() -> Vec<&'static str> {
        vec![REMAINING]
    }

    fn read(text: &str) -> Option<Self> {
        match text {
            REMAINING => Some(Self::Remaining),
            _ => u64::read(text).map(Self::Bytes),
        }
    }

    fn error(flag: &'static str, key: &'static str, text: &str) -> ConfigError {
        match u64::error(flag, key, text) {
            ConfigError::NotASize { error: SizeError::Malformed { .. }, .. } => {
                let expected = Self::expected() + &suggestion(text, Self::words());
                let (key, value) = (key.to_owned(), text.to_owned());
                ConfigError::BadValue { flag, key, value, expected }
            }
            other => other,
        }
    }
}

section! {
    /// Volume of a pool.
    pub struct PmVolumeConfig: "--pm-volume"
        "Volumes of a pool; size=remaining leaves enough for --pm-memory" {
        pool: PathBuf => "Pool that has the volume",
        name: String => "Name of the volume in the pool",
        size: VolumeSize
            => "Size of the volume; an existing volume must have it, unless it is remaining",
        format: VolumeFormat = VolumeFormat::Btt
            => "Format of the volume; an existing volume must have it",
        interface: VolumeInterface = VolumeInterface::Auto => "Interface to the guest",
        create: bool = false => "Create the volume if it is missing",
        thin: Option<bool>
            => "Create a thin volume, which gets space when it is written; on by default for btt",
        reserve: Option<u64>
            => "Guaranteed part of a thin volume, from 0 to its size; all of it by default",
        on_full: OnFull = OnFull::Pause => "Effect of a write that finds no space in the pool",
        readonly: bool = false => "Refuse writes of the guest",
        force: bool = false => "Attach the volume even if it is damaged or the interface is unsafe",
    }
    strict true;
}

impl PmVolumeConfig {
    /// Kind of the device in metrics.
    pub const KIND: &'static str = "volume";

    pub fn key(&self) -> VolumeKey {
        VolumeKey { pool: self.pool.clone(), name: self.name.clone() }
    }

    /// Flag with the properties that identify the volume in errors.
    pub fn flag(&self) -> String {
        self.source().to_string()
    }

    /// Source of the volume's range of guest memory.
    pub fn source(&self) -> RangeSource {
        let key = format!("pool={},name={}", self.pool.display(), self.name);
        RangeSource { flag: Self::FLAG, key }
    }

    /// Records the size after a growth. A size that is not a number of bytes stays valid.
    pub fn has_grown(&mut self, size_bytes: u64) {
        if let VolumeSize::Bytes(bytes) = &mut self.size {
            *bytes = size_bytes;
        }
    }

    /// Returns true if the volume would be thin if it were created.
    pub fn creates_thin(&self) -> bool {
        self.thin.unwrap_or(self.format.is_thin_by_default())
    }

    /// Returns true if this is the volume `key`, possibly with another path of its pool.
    pub fn is(&self, key: &VolumeKey) -> bool {
        self.name == key.name && is_same(&self.pool, &key.pool)
    }

    /// Checks that the name is valid in a pool, that the size is within its limits, and that no
    /// keys contradict each other.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        let name = self.name.parse::<VolumeName>();
        name.map_err(|error| ConfigError::Conflict { flag, reason: error.to_string() })?;
        if let VolumeSize::Bytes(bytes) = self.size {
            size::check(flag, "size", bytes)?;
        }
        let conflict = |reason: String| Err(ConfigError::Conflict { flag, reason });
        match (self.create, self.size, self.readonly) {
            (true, VolumeSize::Existing, _) => {
                conflict(format!("create=on of volume {} needs a size=", self.name))
            }
            (true, _, true) => {
                conflict(format!("volume {} cannot be created with readonly=on", self.name))
            }
            (false, _, _) if self.thin == Some(true) => {
                conflict(format!("thin=on of volume {} needs create=on", self.name))
            }
            _ if self.format == VolumeFormat::Raw
                && (self.thin == Some(true) || self.reserve.is_some()) =>
            {
                let name = &self.name;
                conflict(format!("volume {name} with format=raw cannot be thin or have a reserve="))
            }
            (create, _, _) if self.reserve.is_some() && !(create && self.creates_thin()) => {
                conflict(format!("reserve= of volume {} needs create=on, thin=on", self.name))
            }
            _ if self.reserve.is_some() && self.size == VolumeSize::Remaining => {
                conflict(format!("reserve= of volume {} needs a size= in bytes", self.name))
            }
            _ => self.check_reserve(),
        }
    }

    fn check_reserve(&self) -> Result<(), ConfigError> {
        match (self.reserve, self.size) {
            (None | Some(0), _) => Ok(()),
            (Some(bytes), VolumeSize::Bytes(size_bytes)) if bytes > size_bytes => {
                let because = ", the size of the volume";
                size::check_most(Self::FLAG, "reserve", bytes, size_bytes, because)
            }
            (Some(bytes), _) => size::check(Self::FLAG, "reserve", bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        PmVolumeConfig::parse(text).and_then(|volume| volume.validate()).unwrap_err().to_string()
    }

    #[test]
    fn size_in_json_equals_that_of_the_flag() {
        for (text, json) in [
            ("pool=/p,name=a,size=2M", r#"{"pool":"/p","name":"a","size":2097152}"#),
            ("pool=/p,name=a,size=remaining", r#"{"pool":"/p","name":"a","size":"remaining"}"#),
            ("pool=/p,name=a", r#"{"pool":"/p","name":"a"}"#),
        ] {
            let volume = PmVolumeConfig::parse(text).unwrap();
            assert_eq!(serde_json::from_str::<PmVolumeConfig>(json).unwrap(), volume);
            let shown = serde_json::to_string(&volume).unwrap();
            assert!(shown.starts_with(json.trim_end_matches('}')), "{shown}");
        }
        for wrong in [r#""2M""#, "-1", "1.5", "[]"] {
            let json = format!(r#"{{"pool": "/p", "name": "a", "size": {wrong}}}"#);
            let error = serde_json::from_str::<PmVolumeConfig>(&json).unwrap_err().to_string();
            assert!(
                error.contains("must be a whole number of bytes, or \"remaining\""),
                "{wrong}: {error}"
            );
        }
    }

    #[test]
    fn flag_is_parsed() {
        let volume = PmVolumeConfig::parse(
            "pool=/pm/pool,name=data,size=8G,interface=virtio-pmem,create=on,readonly=off,force=on,format=btt",
        )
        .unwrap();
        let expected = PmVolumeConfig {
            pool: "/pm/pool".into(),
            name: "data".to_owned(),
            size: VolumeSize::Bytes(8 << 30),
            format: VolumeFormat::Btt,
            interface: VolumeInterface::VirtioPmem,
            create: true,
            thin: None,
            reserve: None,
            on_full: OnFull::Pause,
            readonly: false,
            force: true,
        };
        assert_eq!(volume, expected);
        assert!(volume.validate().is_ok());
        let volume = PmVolumeConfig::parse("pool=/p,name=a").unwrap();
        assert_eq!((volume.size, volume.interface), (VolumeSize::Existing, VolumeInterface::Auto));
        assert_eq!(volume.format, VolumeFormat::Btt);
        assert!(volume.validate().is_ok());
        assert_eq!(
            PmVolumeConfig::parse("pool=/p,name=a,size=remaining").unwrap().size,
            VolumeSize::Remaining
        );
        let raw = PmVolumeConfig::parse("pool=/p,name=a,size=2M,create=on,format=raw").unwrap();
        assert_eq!(raw.format, VolumeFormat::Raw);
        assert!(raw.validate().is_ok());
        // The key may be missing in JSON from older clients.
        let json: PmVolumeConfig = serde_json::from_str(r#"{"pool": "/p", "name": "a"}"#).unwrap();
        assert_eq!(json.format, VolumeFormat::Btt);
        let json = serde_json::to_value(&raw).unwrap();
        assert_eq!(json["format"], "raw");
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("name=a"), "--pm-volume: pool= is missing");
        assert_eq!(error("pool=/p"), "--pm-volume: name= is missing");
        assert_eq!(
            error("pool=/p,name=a,size=0"),
            "--pm-volume: size is 0, and must be at least 2 MiB"
        );
        assert!(error("pool=/p,name=a,size=3M").contains("not a multiple of 2 MiB"));
        assert!(error("pool=/p,name=a,size=rest").contains(r#"size="rest" is not a size"#));
        assert!(
            error("pool=/p,name=a,interface=scsi")
                .contains("auto, nvdimm, virtio-pmem or virtio-blk")
        );
        assert!(
            error("pool=/p,name=a/b").starts_with(r#"--pm-volume: volume name "a/b" contains '/'"#)
        );
        assert_eq!(error("pool=/p,name="), "--pm-volume: name= is missing");
        assert!(
            error(&format!("pool=/p,name={}", "a".repeat(65)))
                .ends_with("65 bytes; the maximum is 64")
        );
        assert_eq!(
            error("pool=/p,name=a,format=qcow2"),
            r#"--pm-volume: format="qcow2" is not btt or raw"#
        );
        assert_eq!(
            error("pool=/p,name=a,format=raw,format=btt"),
            "--pm-volume: format is given twice"
        );
        assert_eq!(
            error("pool=/p,name=a,create=on"),
            "--pm-volume: create=on of volume a needs a size="
        );
        assert!(error("pool=/p,name=a,size=2M,create=on,readonly=on").contains("readonly=on"));
        assert_eq!(
            error("pool=/p,name=a,thin=on"),
            "--pm-volume: thin=on of volume a needs create=on"
        );
        assert_eq!(
            error("pool=/p,name=a,size=20M,create=on,thin=off,reserve=2M"),
            "--pm-volume: reserve= of volume a needs create=on, thin=on"
        );
        assert!(error("pool=/p,name=a,reserve=2M").contains("needs create=on, thin=on"));
        for keys in ["thin=on", "reserve=2M"] {
            assert_eq!(
                error(&format!("pool=/p,name=a,size=20M,create=on,format=raw,{keys}")),
                "--pm-volume: volume a with format=raw cannot be thin or have a reserve="
            );
        }
        for (keys, thin) in
            [("force=off", true), ("thin=on", true), ("thin=off", false), ("format=raw", false)]
        {
            let volume =
                PmVolumeConfig::parse(&format!("pool=/p,name=a,size=20M,create=on,{keys}"));
            let volume = volume.unwrap();
            volume.validate().unwrap();
            assert_eq!(volume.creates_thin(), thin, "{keys}");
        }
        let thin = |keys: &str| format!("pool=/p,name=a,size=20M,create=on,thin=on,{keys}");
        assert_eq!(
            error(&thin("reserve=22M")),
            "--pm-volume: reserve is 22 MiB, and must be at most 20 MiB, the size of the volume"
        );
        assert_eq!(
            error("pool=/p,name=a,size=remaining,create=on,thin=on,reserve=2M"),
            "--pm-volume: reserve= of volume a needs a size= in bytes"
        );
        assert!(error(&thin("reserve=3M")).contains("not a multiple of 2 MiB"));
        assert!(error(&thin("on_full=stop")).contains("pause or error"));
        for reserve in ["0", "2M", "20M"] {
            let volume = PmVolumeConfig::parse(&thin(&format!("reserve={reserve}"))).unwrap();
            volume.validate().unwrap();
        }
    }
}
