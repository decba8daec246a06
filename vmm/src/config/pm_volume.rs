//! `--pm-volume pool=,name=,size=,format=,interface=,create=,readonly=,force=`.

use std::fmt;
use std::path::PathBuf;

use pmem_volume::pool::VolumeName;
use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::ConfigError;
use super::option_parser::Syntax;
use super::size;

pub(super) const SYNTAX: Syntax = Syntax {
    flag: "--pm-volume",
    keys: &["pool", "name", "size", "format", "interface", "create", "readonly", "force"],
    words: &[],
    refused: &[],
};

/// How a volume is shown to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeInterface {
    /// The safest that the guest can use.
    #[default]
    Auto,
    /// An NVDIMM, by ACPI NFIT.
    Nvdimm,
    /// A virtio-pmem device.
    VirtioPmem,
    /// A virtio-blk disk, whose sectors the VMM translates.
    VirtioBlk,
}

/// What a volume's bytes are to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeFormat {
    /// A Block Translation Table: a disk whose sectors do not tear.
    #[default]
    Btt,
    /// Nothing but bytes, which programs in the guest may map (DAX). Sectors may tear.
    Raw,
}

impl fmt::Display for VolumeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Btt => "btt",
            Self::Raw => "raw",
        })
    }
}

impl From<pmem_volume::VolumeFormat> for VolumeFormat {
    fn from(format: pmem_volume::VolumeFormat) -> Self {
        match format {
            pmem_volume::VolumeFormat::Btt => Self::Btt,
            pmem_volume::VolumeFormat::Raw => Self::Raw,
        }
    }
}

impl From<VolumeFormat> for pmem_volume::VolumeFormat {
    fn from(format: VolumeFormat) -> Self {
        match format {
            VolumeFormat::Btt => Self::Btt,
            VolumeFormat::Raw => Self::Raw,
        }
    }
}

/// How large a volume shall be. In JSON bytes, or `"remaining"`, as the flag has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VolumeSize {
    /// What it is.
    #[default]
    Existing,
    /// So many bytes.
    Bytes(u64),
    /// Rest of the pool after the other volumes and the VM's `--pm-memory`, computed at each boot.
    Remaining,
}

/// As the flag and JSON call it.
const REMAINING: &str = "remaining";

impl VolumeSize {
    fn is_existing(&self) -> bool {
        *self == Self::Existing
    }
}

impl Serialize for VolumeSize {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Existing => to.serialize_none(),
            Self::Bytes(bytes) => to.serialize_u64(*bytes),
            Self::Remaining => to.serialize_str(REMAINING),
        }
    }
}

impl<'de> Deserialize<'de> for VolumeSize {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct BytesOrWord;

        impl Visitor<'_> for BytesOrWord {
            type Value = VolumeSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number of bytes, or {REMAINING:?}")
            }

            fn visit_unit<E>(self) -> Result<VolumeSize, E> {
                Ok(VolumeSize::Existing)
            }

            fn visit_u64<E>(self, bytes: u64) -> Result<VolumeSize, E> {
                Ok(VolumeSize::Bytes(bytes))
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<VolumeSize, E> {
                match word {
                    REMAINING => Ok(VolumeSize::Remaining),
                    _ => Err(E::invalid_value(Unexpected::Str(word), &self)),
                }
            }
        }

        from.deserialize_any(BytesOrWord)
    }
}

/// `--pm-volume pool=,name=,size=,format=,interface=,create=,readonly=,force=`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmVolumeConfig {
    /// The pool.
    pub pool: PathBuf,
    /// The volume's name in it.
    pub name: String,
    /// Size of the volume. A size other than that of the existing volume is an error, unless it is `remaining`.
    #[serde(default, skip_serializing_if = "VolumeSize::is_existing")]
    pub size: VolumeSize,
    /// Its format: another one than the volume has is an error, since who maps raw bytes must know that they tear.
    #[serde(default)]
    pub format: VolumeFormat,
    /// How it is shown.
    #[serde(default)]
    pub interface: VolumeInterface,
    /// Make it when it is missing.
    #[serde(default)]
    pub create: bool,
    /// The guest must not write.
    #[serde(default)]
    pub readonly: bool,
    /// Take an interface that is known to be unsafe.
    #[serde(default)]
    pub force: bool,
}

impl PmVolumeConfig {
    /// Reads one of the flag's values.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        let size = match options.text("size") {
            None => VolumeSize::Existing,
            Some(REMAINING) => VolumeSize::Remaining,
            Some(_) => VolumeSize::Bytes(options.required("size", options.size("size")?)?),
        };
        let interface =
            options.read("interface", "auto, nvdimm, virtio-pmem or virtio-blk", |text| match text {
                "auto" => Some(VolumeInterface::Auto),
                "nvdimm" => Some(VolumeInterface::Nvdimm),
                "virtio-pmem" => Some(VolumeInterface::VirtioPmem),
                "virtio-blk" => Some(VolumeInterface::VirtioBlk),
                _ => None,
            })?;
        let format = options.read("format", "btt or raw", |text| match text {
            "btt" => Some(VolumeFormat::Btt),
            "raw" => Some(VolumeFormat::Raw),
            _ => None,
        })?;
        let name = options.read("name", "a name", |text| Some(text.to_owned()))?;
        Ok(Self {
            pool: options.required("pool", options.path("pool")?)?,
            name: options.required("name", name)?,
            size,
            format: format.unwrap_or_default(),
            interface: interface.unwrap_or_default(),
            create: options.switch("create")?.unwrap_or(false),
            readonly: options.switch("readonly")?.unwrap_or(false),
            force: options.switch("force")?.unwrap_or(false),
        })
    }

    /// A name that a pool can hold, a size within its bounds, and no wish that contradicts another.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let flag = SYNTAX.flag;
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
            (true, _, true) => conflict(format!("volume {} cannot be created readonly=on", self.name)),
            _ => Ok(()),
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
    fn a_size_in_json_is_what_the_flag_says() {
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
                error.contains(r#"expected a whole number of bytes, or "remaining""#),
                "{wrong}: {error}"
            );
        }
    }

    #[test]
    fn the_flag_is_read() {
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
        // In JSON it may be missing, as in what older clients send.
        let json: PmVolumeConfig = serde_json::from_str(r#"{"pool": "/p", "name": "a"}"#).unwrap();
        assert_eq!(json.format, VolumeFormat::Btt);
        let json = serde_json::to_value(&raw).unwrap();
        assert_eq!(json["format"], "raw");
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(error("name=a"), "--pm-volume: pool= is missing");
        assert_eq!(error("pool=/p"), "--pm-volume: name= is missing");
        assert_eq!(error("pool=/p,name=a,size=0"), "--pm-volume: size is 0, and must be at least 2 MiB");
        assert!(error("pool=/p,name=a,size=3M").contains("not a multiple of 2 MiB"));
        assert!(error("pool=/p,name=a,size=rest").contains(r#"size="rest" is not a size"#));
        assert!(error("pool=/p,name=a,interface=scsi").contains("auto, nvdimm, virtio-pmem or virtio-blk"));
        assert!(error("pool=/p,name=a/b").starts_with(r#"--pm-volume: the volume name "a/b" has '/' in it"#));
        assert_eq!(error("pool=/p,name="), "--pm-volume: a volume's name may not be empty");
        assert!(error(&format!("pool=/p,name={}", "a".repeat(65))).ends_with("65 bytes; at most 64 fit"));
        assert_eq!(error("pool=/p,name=a,format=qcow2"), r#"--pm-volume: format="qcow2" is not btt or raw"#);
        assert_eq!(error("pool=/p,name=a,format=raw,format=btt"), "--pm-volume: format is given twice");
        assert_eq!(error("pool=/p,name=a,create=on"), "--pm-volume: create=on of volume a needs a size=");
        assert!(error("pool=/p,name=a,size=2M,create=on,readonly=on").contains("readonly=on"));
    }
}
