//! `--serial` and `--console`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use foreshore_config::refused_keys as refused;
use foreshore_config::size::MAX_BYTES;
use foreshore_config::{ConfigError, FlagValue, Options, Refused, Section, Table, section, words};
use foreshore_types::size::Size;

use crate::unix_socket::check_path;

const REFUSED: &[Refused] =
    &[Refused { key: "id", neutral: &["__console"], why: "its id is fixed" }];

pub const SERIAL: Table =
    Table::of::<ConsoleConfig>().named("--serial", "COM1, ttyS0; null if not given");
pub const CONSOLE: Table = Table::of::<ConsoleConfig>();

words! {
    /// Destination of a console's output.
    pub enum ConsoleMode {
        /// No device.
        Off = "Off" "off",
        /// Device whose output is discarded.
        Null = "Null" "null",
        /// Standard input and output of the VMM.
        Tty = "Tty" "tty",
        /// A pseudo terminal.
        Pty = "Pty" "pty",
        /// A file for output. The guest gets no input.
        File = "File" "file",
        /// A socket that clients connect to.
        Socket = "Socket" "socket",
    }
}

section! {
    /// Console: the serial port or virtio-console.
    pub struct ConsoleConfig: "--console" "virtio-console, hvc0; tty if not given" {
        mode (json_only json_required): ConsoleMode = ConsoleMode::Off => "Destination",
        file: Option<PathBuf>
            => "Output file; for a pseudo terminal its path, as vm.info shows it",
        socket: Option<PathBuf> => "Unix socket that clients connect to",
        max_size (usually (DEFAULT_MAX_SIZE)): Option<u64>
            => "Maximum file size; 0 disables the limit",
        max_rate (usually (DEFAULT_MAX_RATE)): Option<u64>
            => "Maximum growth of the file per second after a burst; 0 disables the limit",
    }
    words &["off", "null", "tty", "pty"];
    refused &[refused::PCI, refused::SLOT, REFUSED];
    defaults true;
    parse own;
}

/// Limits of a console's output file. `None` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLimits {
    pub max_bytes: Option<u64>,
    /// Rate at which the guest may write after the burst.
    pub bytes_per_s: Option<NonZeroU64>,
}

/// Default size limit of a console's output file.
pub const DEFAULT_MAX_SIZE: u64 = 64 << 20;

/// Smallest size limit. With a smaller limit, nearly every write would rename the file.
const MIN_MAX_SIZE: u64 = 64 << 10;

/// Default rate limit of a console's output file, in bytes per second. A guest that never stops
/// writing can write 84 GiB a day at this rate.
pub const DEFAULT_MAX_RATE: u64 = 1 << 20;

/// Lowest rate limit in bytes per second. A guest waits until a write of 64 KiB is allowed.
/// Meanwhile, Linux spins with interrupts disabled (__send_to_port in
/// drivers/char/virtio_console.c).
pub const MIN_MAX_RATE: u64 = 1 << 20;

impl ConsoleConfig {
    /// Default for COM1: a device whose output is discarded.
    pub fn default_serial() -> Self {
        Self { mode: ConsoleMode::Null, ..Self::default() }
    }

    /// Default for hvc0: the terminal.
    pub fn default_console() -> Self {
        Self { mode: ConsoleMode::Tty, ..Self::default() }
    }

    /// Parses the value of `--serial`.
    pub fn parse_serial(text: &str) -> Result<Self, ConfigError> {
        Self::parse(&SERIAL, text)
    }

    /// Parses the value of `--console`.
    pub fn parse_console(text: &str) -> Result<Self, ConfigError> {
        Self::parse(&CONSOLE, text)
    }

    fn parse(table: &Table, text: &str) -> Result<Self, ConfigError> {
        let options = Options::parse(table, &[], text)?;
        let mut console = Self::from_options(&options)?;
        let words = options.words().iter().filter_map(|word| ConsoleMode::read(word));
        let file = console.file.as_ref().map(|_| ConsoleMode::File);
        let socket = console.socket.as_ref().map(|_| ConsoleMode::Socket);
        let mut modes = words.chain(file).chain(socket);
        match (modes.next(), modes.next()) {
            (Some(mode), None) => console.mode = mode,
            _ => {
                let forms = "off, null, tty, pty, file=PATH and socket=PATH";
                let (flag, text) = (table.flag, text.to_owned());
                return Err(ConfigError::NotOneOf { flag, text, forms });
            }
        }
        Ok(console)
    }

    /// Checks that a file or socket is given if and only if the mode needs it.
    pub fn validate(&self, flag: &'static str) -> Result<(), ConfigError> {
        let file_fits = (self.mode == ConsoleMode::File) == self.file.is_some()
            || self.mode == ConsoleMode::Pty;
        if !file_fits || (self.mode == ConsoleMode::Socket) != self.socket.is_some() {
            let Self { mode, file, socket, .. } = self;
            let reason =
                format!("mode {mode:?}, file {file:?} and socket {socket:?} contradict each other");
            return Err(ConfigError::Conflict { flag, reason });
        }
        self.check_file_limit(flag, "max_size", self.max_size, MIN_MAX_SIZE)?;
        self.check_file_limit(flag, "max_rate", self.max_rate, MIN_MAX_RATE)?;
        self.socket.as_ref().map_or(Ok(()), |path| check_path(flag, path))
    }
}

impl ConsoleConfig {
    pub fn file_limits(&self) -> FileLimits {
        FileLimits {
            max_bytes: Some(self.max_size.unwrap_or(DEFAULT_MAX_SIZE)).filter(|bytes| *bytes > 0),
            bytes_per_s: NonZeroU64::new(self.max_rate.unwrap_or(DEFAULT_MAX_RATE)),
        }
    }

    fn check_file_limit(
        &self,
        flag: &'static str,
        key: &'static str,
        limit: Option<u64>,
        least: u64,
    ) -> Result<(), ConfigError> {
        let Some(bytes) = limit else { return Ok(()) };
        if self.mode != ConsoleMode::File {
            let reason = format!("{key} needs mode File, but the mode is {:?}", self.mode);
            return Err(ConfigError::Conflict { flag, reason });
        }
        let value = Size(bytes);
        if (1..least).contains(&bytes) {
            return Err(ConfigError::TooSmall { flag, key, value, least: Size(least) });
        }
        if bytes > MAX_BYTES {
            return Err(ConfigError::TooLarge {
                flag,
                key,
                value,
                most: Size(MAX_BYTES),
                because: "",
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_parsed() {
        let serial = |text| ConsoleConfig::parse_serial(text).unwrap();
        assert_eq!(serial("off").mode, ConsoleMode::Off);
        assert_eq!(serial("null").mode, ConsoleMode::Null);
        assert_eq!(serial("tty").mode, ConsoleMode::Tty);
        assert_eq!(serial("pty").mode, ConsoleMode::Pty);
        let file = ConsoleConfig {
            mode: ConsoleMode::File,
            file: Some("/log".into()),
            ..Default::default()
        };
        assert_eq!(serial("file=/log"), file);
        assert!(file.validate("--serial").is_ok());
        let socket = ConsoleConfig {
            mode: ConsoleMode::Socket,
            socket: Some("/s".into()),
            ..Default::default()
        };
        assert_eq!(serial("socket=/s"), socket);
        assert!(socket.validate("--serial").is_ok());
        let json = |text| serde_json::from_str::<ConsoleConfig>(text).unwrap();
        assert_eq!(json(r#"{"mode":"Socket","socket":"/s"}"#), socket);
        // The form in which the API returns a console while the VM runs.
        assert!(json(r#"{"mode":"Pty","file":"/dev/pts/3"}"#).validate("--serial").is_ok());
        assert_eq!(json(r#"{"mode":"Pty"}"#), serial("pty"));
    }

    #[test]
    fn size_of_a_file_is_limited() {
        let serial = |text| ConsoleConfig::parse_serial(text).unwrap();
        let max_bytes = |text| serial(text).file_limits().max_bytes;
        assert_eq!(max_bytes("file=/log"), Some(DEFAULT_MAX_SIZE));
        assert_eq!(max_bytes("file=/log,max_size=2M"), Some(2 << 20));
        assert_eq!(max_bytes("file=/log,max_size=0"), None);
        let json = r#"{"mode":"File","file":"/log","max_size":65536}"#;
        assert_eq!(
            serde_json::from_str::<ConsoleConfig>(json).unwrap(),
            serial("file=/log,max_size=64K")
        );
        let error = |text| serial(text).validate("--serial").unwrap_err().to_string();
        assert_eq!(
            error("file=/log,max_size=1K"),
            "--serial: max_size is 1 KiB, and must be at least 64 KiB"
        );
        assert!(
            error("file=/log,max_size=100000T")
                .starts_with("--serial: max_size is 100000 TiB, and must be at most")
        );
        assert_eq!(
            error("tty,max_size=1M"),
            "--serial: max_size needs mode File, but the mode is Tty"
        );
        assert!(serial("file=/log,max_size=0").validate("--serial").is_ok());
        let text = ConsoleConfig::parse_serial("file=/log,max_size=big").unwrap_err().to_string();
        assert!(text.starts_with("--serial: max_size"), "{text}");
    }

    #[test]
    fn rate_of_a_file_is_limited() {
        let console = |text| ConsoleConfig::parse_console(text).unwrap();
        let rate = |text| console(text).file_limits().bytes_per_s.map(NonZeroU64::get);
        assert_eq!(rate("file=/log"), Some(1 << 20));
        assert_eq!(rate("file=/log,max_rate=8M,max_size=0"), Some(8 << 20));
        assert_eq!(rate("file=/log,max_rate=0"), None);
        let json = r#"{"mode":"File","file":"/log","max_rate":1048576}"#;
        let config = console("file=/log,max_rate=1M");
        assert_eq!(serde_json::from_str::<ConsoleConfig>(json).unwrap(), config);
        assert_eq!(serde_json::to_string(&config).unwrap(), json);
        for text in ["file=/log,max_rate=1M", "file=/log,max_rate=0"] {
            assert!(console(text).validate("--console").is_ok());
        }
        let error = |text| console(text).validate("--console").unwrap_err().to_string();
        assert_eq!(
            error("file=/log,max_rate=1048575"),
            "--console: max_rate is 1048575 bytes, and must be at least 1 MiB"
        );
        assert!(
            error("file=/log,max_rate=100000T")
                .starts_with("--console: max_rate is 100000 TiB, and must be at most")
        );
        for (text, mode) in [
            ("tty,max_rate=0", "Tty"),
            ("null,max_rate=0", "Null"),
            ("pty,max_rate=0", "Pty"),
            ("off,max_rate=0", "Off"),
            ("socket=/s,max_rate=0", "Socket"),
        ] {
            assert_eq!(
                error(text),
                format!("--console: max_rate needs mode File, but the mode is {mode}")
            );
        }
        let text = ConsoleConfig::parse_console("file=/log,max_rate=fast").unwrap_err().to_string();
        assert!(text.starts_with("--console: max_rate"), "{text}");
    }

    #[test]
    fn unknown_modes_are_refused() {
        let error = |text| ConsoleConfig::parse_console(text).unwrap_err().to_string();
        let modes = "off, null, tty, pty, file=PATH and socket=PATH";
        for text in ["off,tty", "tty,file=/log", "pty,socket=/s", "file=/log,socket=/s"] {
            assert_eq!(error(text), format!("--console: {text:?} is not one of {modes}"));
        }
        assert_eq!(error("file="), format!("--console: \"file=\" is not one of {modes}"));
        assert!(
            error("loud")
                .contains("the keys are off, null, tty, pty, file=, socket=, max_size=, max_rate=")
        );
        assert!(error("pty,iommu=on").contains("a virtual IOMMU"));
        let wrong = |mode, file: Option<&str>, socket: Option<&str>| {
            let (file, socket) = (file.map(Into::into), socket.map(Into::into));
            let config = ConsoleConfig { mode, file, socket, ..Default::default() };
            config.validate("--serial").unwrap_err().to_string()
        };
        assert!(wrong(ConsoleMode::File, None, None).starts_with("--serial: mode File"));
        assert!(wrong(ConsoleMode::Socket, Some("/f"), None).starts_with("--serial: mode Socket"));
        assert!(wrong(ConsoleMode::Pty, None, Some("/s")).starts_with("--serial: mode Pty"));
        let long = "x".repeat(108);
        assert!(wrong(ConsoleMode::Socket, None, Some(&long)).contains("107"));
    }
}
