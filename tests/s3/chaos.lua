-- Faults and shaping for nginx_chaos.conf.template (Debian libnginx-mod-http-lua 0.10.23, LuaJIT).
-- A fault is drawn per request from md5(seed|method|uri|range|n), n = how often that very request was seen since /clear:
-- runs repeat whatever the order or concurrency, and a retry of the same range draws anew.
local M = {upstream = 0}
local D = {
  shaped = {latency_ms = 30, rate = 80e6},
  chaos = {latency_ms = 0, rate = 0, slow = 0.05, reset = 0.02, trunc = 0.01, stall = 0.01, flip = 0, short = 0, stall_s = 5, seed = 1, min_body = 1},
  plain = {},
}
local KINDS = {"slow", "reset", "trunc", "stall", "flip", "short"}
local bit = require "bit"
local dict = ngx.shared.chaos

local function get(p, k)
  return dict:get("cfg:" .. p .. ":" .. k) or D[p][k] or 0
end

local function draw(p)
  local key = get(p, "seed") .. "|" .. ngx.req.get_method() .. "|" .. ngx.var.request_uri:gsub("[?&]X%-Amz[^&]*", "") .. "|" .. (ngx.var.http_range or "")
  local n = dict:incr("n:" .. ngx.crc32_long(key), 1, 0) or 1
  -- crc32 is linear, so two draws from it are correlated; md5 is not
  local h = ngx.md5(key .. "|" .. n)
  return tonumber(h:sub(1, 8), 16) / 4294967296, tonumber(h:sub(9, 16), 16) / 4294967296
end

local function count(p, what, by)
  dict:incr("c:" .. p .. ":" .. what, by or 1, 0)
end

local SLOW = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message>' ..
  '<RequestId>chaos</RequestId><HostId>chaos</HostId></Error>'

function M.mend() -- rclone serve s3 answers a range with 200, and with the checksum of the whole object (botocore then refuses the body)
  if ngx.status == 200 and ngx.header["Content-Range"] then
    ngx.status = 206
    for _, a in ipairs({"crc32", "crc32c", "crc64nvme", "sha1", "sha256"}) do ngx.header["x-amz-checksum-" .. a] = nil end
  end
end

function M.access()
  local p = ngx.var.profile
  count(p, "requests")
  count(p, "seen:" .. ngx.req.get_method() .. " " .. (ngx.var.uri:match("%.%a+$") or "/"))
  local lat = get(p, "latency_ms")
  if lat > 0 then ngx.sleep(lat / 1000) end
  local u, frac = draw(p)
  local fault = "-"
  for _, k in ipairs(KINDS) do
    u = u - get(p, k)
    if u < 0 then fault = k; break end
  end
  if fault == "slow" then
    ngx.var.fault = fault
    count(p, fault)
    ngx.status = 503
    ngx.header["Content-Type"] = "application/xml"
    ngx.header["Content-Length"] = #SLOW
    ngx.header["x-amz-request-id"] = "chaos"
    if ngx.req.get_method() ~= "HEAD" then ngx.print(SLOW) end
    return ngx.exit(503)
  end
  local object = ngx.req.get_method() == "GET" and ngx.var.uri:match("^/[^/]+/.+") and not ngx.var.arg_uploadId
  if object and (fault ~= "-" or get(p, "rate") > 0) then
    if fault ~= "-" then ngx.var.fault = fault .. ":" .. string.format("%.4f", 0.02 + 0.96 * frac) end
    return ngx.exec(fault == "reset" and "@relay_rst" or "@relay")
  end
end

local function refuse(msg)
  ngx.log(ngx.WARN, "chaos relay: ", msg)
  return ngx.exit(502)
end

function M.relay() -- GET of an object, streamed by hand so that it can be paced, stalled, cut or altered
  local p = ngx.var.profile
  local rate = get(p, "rate")
  local fault, frac = ngx.var.fault:match("^(%a+):(.*)$")
  local s = ngx.socket.tcp()
  s:settimeouts(5000, 120000, 120000)
  local head, resp, err
  local raw = "GET " .. ngx.var.request_uri .. " HTTP/1.1\r\n" .. ngx.req.raw_header(true)
  for attempt = 1, 2 do -- once more where a pooled connection had gone stale
    local ok
    ok, err = s:connect("127.0.0.1", M.upstream, {pool_size = 128})
    if not ok then return refuse(err) end
    local reused = s:getreusedtimes() > 0
    ok, err = s:send(raw)
    if ok then resp, err = s:receive("*l") end
    if resp or not reused then break end
    s:close()
  end
  if not resp then return refuse(err or "no response") end
  ngx.status = tonumber(resp:match("^HTTP/%d%.%d (%d%d%d)"))
  local len, chunked, keep = nil, false, true
  while true do
    local l = s:receive("*l")
    if not l then return refuse("headers cut") end
    if l == "" then break end
    local k, v = l:match("^([^:]+):%s*(.*)$")
    local lk = k:lower()
    if lk == "content-length" then len = tonumber(v)
    elseif lk == "transfer-encoding" then chunked = true
    elseif lk == "connection" then keep = v:lower() ~= "close"
    elseif lk ~= "keep-alive" then
      local had = ngx.header[k]
      if had and lk:sub(1, 6) == "x-amz-" then ngx.header[k] = had .. ", " .. v else ngx.header[k] = v end
    end
  end
  M.mend()
  if ngx.status == 304 or ngx.status == 204 then len = 0 end
  local good = ngx.status == 200 or ngx.status == 206
  if fault and not (good and len and len >= math.max(1, get(p, "min_body"))) then fault = nil; ngx.var.fault = "-" end
  local cut = fault and math.min(len - 1, math.floor(len * tonumber(frac))) or nil -- bytes sent whole before the fault
  if fault then count(p, fault) end
  if len and fault ~= "short" then ngx.header["Content-Length"] = len end
  if fault == "short" then ngx.header["Content-Length"] = nil end -- chunked to the client: ends early and looks whole
  if len == 0 then
    ngx.send_headers()
    if keep then s:setkeepalive(60000) else s:close() end
    return ngx.eof()
  end
  ngx.update_time()
  local t0, sent, whole = ngx.now(), 0, false
  local function emit(data)
    if cut and sent + #data > cut then
      local first = data:sub(1, cut - sent)
      if #first > 0 then ngx.print(first) end
      ngx.flush(true)
      sent = sent + #first
      data = data:sub(#first + 1)
      cut = nil
      if fault == "reset" or fault == "trunc" then s:close(); ngx.exit(444); return false end
      if fault == "short" then return false end
      if fault == "stall" then ngx.sleep(get(p, "stall_s")) end
      if fault == "flip" then data = string.char(bit.bxor(data:byte(1), 1)) .. data:sub(2) end
    end
    if not ngx.print(data) or not ngx.flush(true) then return false end
    sent = sent + #data
    if rate > 0 then
      ngx.update_time()
      local ahead = sent / rate - (ngx.now() - t0)
      if ahead >= 0.001 then ngx.sleep(ahead) end
    end
    return true
  end
  if chunked then
    while true do
      local n = tonumber((s:receive("*l") or ""):match("^%x+") or "", 16)
      if not n then break end
      if n > 0 then local d = s:receive(n); if not d or not emit(d) then break end end
      s:receive("*l")
      if n == 0 then whole = true; break end
    end
  else
    local left = len
    while not left or left > 0 do
      local d = s:receiveany(left and math.min(left, 131072) or 131072)
      if not d or not emit(d) then break end
      if left then left = left - #d end
    end
    whole = left == 0
  end
  if whole and keep then s:setkeepalive(60000) else s:close() end
  if not whole and fault ~= "short" then return ngx.exit(444) end
  return ngx.eof()
end

function M.control()
  local a = ngx.req.get_uri_args()
  local uri = ngx.var.uri
  if uri == "/clear" then
    for _, k in ipairs(dict:get_keys(0)) do if k:sub(1, 4) ~= "cfg:" then dict:delete(k) end end
  elseif uri == "/set" then
    local p = a.profile or "chaos"
    if not D[p] then return ngx.exit(400) end
    for k, v in pairs(a) do
      if k ~= "profile" then
        if D.chaos[k] == nil or not tonumber(v) then ngx.status = 400; return ngx.say("unknown or not a number: ", k) end
        dict:set("cfg:" .. p .. ":" .. k, tonumber(v))
      end
    end
  elseif uri ~= "/stats" then
    return ngx.exit(404)
  end
  ngx.header["Content-Type"] = "application/json"
  local out = {}
  for _, p in ipairs({"shaped", "chaos"}) do
    local t = {'"requests":' .. (dict:get("c:" .. p .. ":requests") or 0)}
    for _, k in ipairs(KINDS) do t[#t + 1] = '"' .. k .. '":' .. (dict:get("c:" .. p .. ":" .. k) or 0) end
    local c, seen, mine = {}, {}, "c:" .. p .. ":seen:"
    for _, k in ipairs(dict:get_keys(0)) do
      if k:sub(1, #mine) == mine then seen[#seen + 1] = '"' .. k:sub(#mine + 1) .. '":' .. dict:get(k) end
    end
    t[#t + 1] = '"seen":{' .. table.concat(seen, ",") .. "}" -- by method and ending: "GET .tar"
    for k in pairs(D.chaos) do c[#c + 1] = '"' .. k .. '":' .. get(p, k) end
    table.sort(c)
    out[#out + 1] = '"' .. p .. '":{' .. table.concat(t, ",") .. ',"config":{' .. table.concat(c, ",") .. "}}"
  end
  ngx.say("{" .. table.concat(out, ",") .. "}")
end

return M
