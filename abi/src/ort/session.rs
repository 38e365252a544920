//! What a session asks of an EP.

use super::HardwareDevice;

/// A session's configuration as an EP sees it.
#[derive(Debug, Clone, Default)]
pub struct SessionOptions {
    /// Every session configuration entry, provider options included.
    pub entries: Vec<(String, String)>,
    /// The devices that the user chose for this EP.
    pub devices: Vec<HardwareDevice>,
}

impl SessionOptions {
    /// The value of a session configuration entry, e.g. `session.disable_cpu_ep_fallback`.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.entries.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    /// The options given to the provider of this name, without their prefix.
    ///
    /// ORT names them `ep.<lowercased name>.<key>`; from 1.28 on, those of "CUDAExecutionProvider" `ep.cuda.<key>`.
    pub fn provider(&self, ep_name: &str) -> impl Iterator<Item = (&str, &str)> {
        let long = format!("ep.{}.", ep_name.to_lowercase());
        let short = (ep_name == "CUDAExecutionProvider").then_some("ep.cuda.");
        self.entries.iter().filter_map(move |(key, value)| {
            let key = key.strip_prefix(&long).or_else(|| key.strip_prefix(short?))?;
            Some((key, value.as_str()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn provider_options_lose_their_prefix() {
        let pair = |k: &str, v: &str| (k.to_string(), v.to_string());
        let entries = vec![
            pair("session.disable_cpu_ep_fallback", "1"),
            pair("ep.nxrtcpuexecutionprovider.chunks", "4"),
            pair("ep.cuda.enable_cuda_graph", "1"),
            pair("ep.cudaexecutionprovider.other", "2"),
        ];
        let session = SessionOptions { entries, devices: vec![] };
        let of = |name| session.provider(name).collect::<Vec<_>>();
        assert_eq!(of("NxrtCpuExecutionProvider"), [("chunks", "4")]);
        assert_eq!(of("CUDAExecutionProvider"), [("enable_cuda_graph", "1"), ("other", "2")]);
        assert_eq!(of("Other"), []);
        assert_eq!(session.get("session.disable_cpu_ep_fallback"), Some("1"));
        assert_eq!(session.get("absent"), None);
    }
}
